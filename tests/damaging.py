"""Ways in which a file is damaged or made hostile: `damage(data, chance)` returns other bytes."""

from __future__ import annotations

import contextlib
import json
import sqlite3

from foreign import rezipped


def mutated(data, chance):
    """A file with flipped bits, a lost end, lost, added or overwritten bytes; half of the time in its first part."""
    out = bytearray(data)
    place = chance.randrange(min(len(out), 3000) if chance.random() < 0.5 else len(out))
    kind = chance.choice(["flip", "flip", "cut", "insert", "delete", "zero", "large"])
    if kind == "flip":
        for _ in range(chance.choice([1, 3, 20])):
            out[chance.randrange(place + 1)] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del out[place:]
    elif kind == "insert":
        out[place:place] = chance.randbytes(chance.randrange(1, 9))
    elif kind == "delete":
        del out[place : place + chance.randrange(1, 50)]
    else:
        out[place : place + 4] = b"\0\0\0\0" if kind == "zero" else chance.choice([b"\xff" * 4, b"\x7f" * 4, b"9999"])
    return bytes(out)


def in_pickle(data, chance):
    """The same archive with a damaged pickle whose checksum is right."""
    return rezipped(data, lambda name, part: mutated(part, chance) if name.endswith("data.pkl") else part)


def in_header(data, chance):
    """safetensors with a damaged header of the right length."""
    length = int.from_bytes(data[:8], "little")
    return data[:8] + mutated(data[8 : 8 + length], chance)[:length].ljust(length) + data[8 + length :]


def in_values(data, chance):
    """JSON with a value of the wrong kind or size, or a key gone."""
    values = json.loads(data)
    key = chance.choice(list(values))
    values[key] = chance.choice(
        [None, -1, 0, 10**12, 1e308, "x", [], {}, [values[key]], True, {"rope_type": 3}, "../x"]
    )
    if chance.random() < 0.2:
        del values[key]
    return json.dumps(values).encode()


def in_entries(data, chance):
    """An index in which an entry has a false value of the right type or of another one, and its old checksum."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        run, value = database.execute("SELECT run, value FROM part").fetchone()
        entry = json.loads(value)
        key = chance.choice(list(entry))
        false = {
            str: ["x", "other", ""],
            int: [7, 10**12],
            bool: [True],
            list: [[], [3], ["loss"]],
            dict: [{}, {"lambda_v1": 3}],
        }
        entry[key] = (
            chance.choice(false[type(entry[key])])
            if chance.random() < 0.7
            else chance.choice([None, -1, 1e308, "x", [], {}])
        )
        database.execute("UPDATE part SET value = ? WHERE run = ?", (json.dumps(entry).encode(), run))
        database.commit()
        return database.serialize()


PATTERNS = (
    r"(a+)+$",
    r"(a|a)*b",
    r"a*a*a*a*b",
    r"(\\w+\\s?)*$",
    r"(?=(a+)+)x",
    r" ?\\p{L}+",
    r"\\s+",
    "(",
    r"(?:a?){30}a{30}",
    "[a-",
    "a{1,3}+b",
)
PIECES = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 900},
    {"type": "Prepend", "prepend": "x" * 999}, {"type": "Lowercase"}, {"type": "NFKD"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Nonsense"}, 3,
)  # fmt: skip


def in_patterns(data, chance):
    """A tokenizer with patterns that try again and again, texts that grow, truncation, padding and settings of the wrong kind."""
    values = json.loads(data)
    pattern = {chance.choice(["Regex", "Regex", "String"]): chance.choice(PATTERNS)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    replaced = {"type": "Replace", "pattern": pattern, "content": chance.choice(["", "b", "a" * 99])}
    pieces = [chance.choice([*PIECES, replaced]) for _ in range(chance.choice([1, 2, 40]))]
    kind = chance.randrange(5)
    if kind == 0:
        values["pre_tokenizer"] = chance.choice([split, {"type": "FixedLength", "length": chance.choice([0, 3, -1])}])
    elif kind == 1:
        values["normalizer"] = {"type": "Sequence", "normalizers": pieces}
    elif kind == 2:
        values["decoder"] = {"type": "Sequence", "decoders": pieces}
    elif kind == 3:
        values["truncation"] = {
            "direction": "Right",
            "max_length": chance.choice([0, 2, 5]),
            "strategy": "LongestFirst",
            "stride": 0,
        }
    else:
        values[chance.choice(["normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens"])] = pieces[0]
    return json.dumps(values).encode()


ROTATIONS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "axial", "ntk", 3, None, [])
NUMBERS = (
    0,
    -1,
    -2.0,
    1,
    2.0,
    8,
    1e308,
    float("nan"),
    float("inf"),
    "2",
    None,
    True,
    [],
    [1.0],
    [1.0] * 4,
    [-1.0] * 4,
    [0] * 4,
    {},
)


def in_rotation(data, chance):
    """A configuration with rotary settings in either block, or both, of every kind and of none."""
    values = json.loads(data)
    for key in chance.choice([["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"]]):
        names = ("factor", "rope_theta", "partial_rotary_factor", "attention_factor", "original_max_position_embeddings", "beta_fast",
                 "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "mscale")  # fmt: skip
        good = chance.random() < 0.5
        block = {
            name: chance.choice((1.0, 2.0, 4, 8.0) if good else NUMBERS) for name in names if chance.random() < 0.4
        }
        values[key] = block | {chance.choice(["rope_type", "type"]): chance.choice(ROTATIONS)}
    for key in ("rope_theta", "partial_rotary_factor", "attn_implementation"):
        if chance.random() < 0.2:
            values[key] = chance.choice([*NUMBERS, "kernels-community/flash-attn2"])
    return json.dumps(values).encode()


PLACES = (
    "http://127.0.0.1:9/x", "https://example.org/runs", "s3://bucket/runs", "hf://datasets/x", "file:///etc", "memory://bucket",
    "../..", "/", "", ".", "/dev/zero", "//host/share", "gpt2", "lab/none@main", "lab/none@../../x", "filecache::s3://bucket/x", "*",
    "(?P<step>.*)", "\0", "x" * 5000,
)  # fmt: skip


def in_places(data, chance):
    """Settings in which a text is a URL or a path of another place, or a key is of the wrong kind."""
    if chance.random() < 0.3:
        return in_values(data, chance)
    values = json.loads(data)
    keys = [k for k, v in values.items() if isinstance(v, str)]
    extra = [
        "_name_or_path",
        "revision",
        "auto_map",
        "attn_implementation",
        "tokenizer_name_or_path",
        "megatron_config",
        "quantization_config",
    ]
    for key in chance.sample([*keys, *keys, *extra], 2):
        values[key] = chance.choice(PLACES)
    return json.dumps(values).encode()


def in_pins(data, chance):
    """Pins whose texts are Markdown, HTML, shell commands or places, or which are damaged."""
    if chance.random() < 0.3:
        return mutated(data, chance)
    values = json.loads(data)
    hostile = (
        "![x](http://127.0.0.1:9/x.png)",
        "[x](http://example.org)",
        '" ; touch x ; echo "$(id)',
        "<img src=x>",
        "`x`",
        "a\n# b\n",
        "--out=/x",
        "$x$",
    )
    for key in chance.sample(list(values["pins"][0]), 2):
        values["pins"][0][key] = chance.choice([*hostile, *PLACES])
    return json.dumps(values).encode()


def in_text(data, chance):
    """A short text that is another place, or damaged."""
    return chance.choice(PLACES).encode() if chance.random() < 0.5 else mutated(data, chance)


NAMES = ["r/run.json", "r/tokenizer.json", "r/step_000000/config.json", "r/step_000000/model.safetensors", "s/run.json"]
ODD_NAMES = (
    "r", "r/run.json/x", "source/run.json", "url", "url/run.json", "n" * 300, "r/" + "n" * 250, "d/" * 900 + "x", "r//run.json",
    "r/../../x", "../x", "r/\0", "r/\n", "r/ü", "r/.hidden", ".remote/url", ".corpora/x/data.json", "r/step_000000", "-",
)  # fmt: skip


def in_names(data, chance):
    """Names of objects that a disk cannot hold, that are those of the bookkeeping, or of which one is the folder of another."""
    return json.dumps([*json.loads(data), *chance.sample(ODD_NAMES, chance.choice([1, 2, 5]))]).encode()
