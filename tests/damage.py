"""Files of every form that a user hands in, how they are damaged (`damaging.py`), and what then reads them."""

from __future__ import annotations

import json
import os
import random
import re
import warnings
from pathlib import Path
from unittest.mock import patch

import dashboard
import llama2c_files
import numpy as np
import pandas as pd
import torch
from damaging import (
    NAMES,
    in_entries,
    in_header,
    in_names,
    in_patterns,
    in_pickle,
    in_pins,
    in_places,
    in_rotation,
    in_text,
    in_values,
    mutated,
)  # fmt: skip
from foreign import GPT, adam_of, gpt2_args, llama_tensors, nanogpt
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import workbench
from workbench import plots
from workbench.checkpoints.formats.llama2c import read_tokenizer
from workbench.checkpoints.loading import read_state
from workbench.checkpoints.paths import CONFIG, WEIGHTS
from workbench.checkpoints.saving import save
from workbench.checkpoints.tokenizer_files import SETTINGS, load_tokenizer
from workbench.claims.collect_evidence import stored, usable
from workbench.cli.dashboard_process import NOTE, running_note
from workbench.data import tokenizer_limits
from workbench.data.corpus import from_files, load_corpus, save_corpus
from workbench.data.example_prompts import examples
from workbench.data.token_shards import read_tokens
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadCheckpoint
from workbench.file_io import write_json
from workbench.places import SHIPPED
from workbench.runs.catalogue import catalogue
from workbench.runs.log_import import import_logs
from workbench.runs.records import SAMPLE_COLUMNS, load_records, metrics_of, read_parquet, records, write_parquet
from workbench.runs.run import Run, list_runs
from workbench.runs.sqlite_index import INDEX
from workbench.runs.table_cache import RecordCache, TelemetryCache
from workbench.storage import mirror
from workbench.studies.demo import STATUS
from workbench.studies.study_file import read_study
from workbench.views import Link, pins
from workbench.views.intervene import parsed
from workbench.views.start import demo_status

SHAPE = {"n_heads": 4, "n_ctx": 128}


def llama(folder):
    """A small Llama of transformers, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2, max_position_embeddings=32))
    model.save_pretrained(folder)
    return model


def adapter(tiny, folder):
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = type(llama(folder / "base")).from_pretrained(folder / "base")
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "base"}))
    return folder / "adapter_config.json", folder


def rotated(tiny, folder):
    llama(folder)
    return folder / CONFIG, folder


def in_hub_cache(tiny, folder):
    place = folder / "models--lab--tiny"
    save(tiny(), place / "snapshots" / "abc123")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc123")
    return place / "refs" / "main", place


def directory(tiny, folder):
    save(tiny(), folder)
    return folder / WEIGHTS, folder


def undeclared(tiny, folder):
    save(tiny("denseformer"), folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(
        json.dumps({k: v for k, v in config.items() if k != "workbench"} | {"model_type": "llama"})
    )
    return folder / CONFIG, folder


def declared(tiny, folder):
    save(tiny("resformer"), folder)
    return folder / CONFIG, folder


def sharded(tiny, folder):
    save(tiny(), folder)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(llama_tensors(tiny()), "a.safetensors")}))
    return index, folder


def pickled(tiny, folder):
    save(tiny(), folder)
    (folder / WEIGHTS).unlink()
    torch.save(llama_tensors(tiny()), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin", folder


def llama2c(tiny, folder):
    llama2c_files.write(folder / "model.bin")
    return folder / "model.bin", folder / "model.bin"


def single(container):
    def make(tiny, folder):
        file = folder / "ckpt.pt"
        torch.save(container(tiny()), file)
        return file, file

    return make


def foreign(tiny, folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder / CONFIG, folder


LOADED = {
    "safetensors": (directory, mutated),
    "safetensors header": (directory, in_header),
    "config": (declared, mutated),
    "values of a config": (declared, in_values),
    "values of a Llama's config": (undeclared, in_values),
    "index": (sharded, mutated),
    "values of an index": (sharded, in_values),
    "pytorch_model.bin": (pickled, mutated),
    "nanoGPT": (single(nanogpt), mutated),
    "nanoGPT's pickle": (single(nanogpt), in_pickle),
    "nanoGPT's GPT-2": (single(lambda m: {"model": GPT(bias=True).state_dict(), "model_args": gpt2_args()}), in_pickle),
    "Lightning's pickle": (single(lambda m: {"state_dict": llama_tensors(m), "global_step": 3, "hyper_parameters": SHAPE}), in_pickle),
    "modded-nanogpt": (single(lambda m: {"step": 3, "code": "", "model": llama_tensors(m), "optimizers": [adam_of(m)]}), in_pickle),
    "llama2.c": (llama2c, mutated),
    "values of another library's config": (foreign, in_values),
    "places in another library's config": (foreign, in_places),
    "adapter's settings": (adapter, in_places),
    "rotary settings": (rotated, in_rotation),
    "revision in the Hub's cache": (in_hub_cache, in_text),
}  # fmt: skip


def reader(write, name, act):
    """A form of its own: `write(file)` makes it under a name, `act(file)` reads it."""

    def make(_, folder):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
        return file, lambda: act(file)

    return make


def in_run(name, act):
    """A file of a whole run `r` with numbers; `act(runs)` reads the folder of runs."""

    def make(_, folder):
        common = dashboard.run(folder, "r", "resformer", 0, "text", steps=(0, 20))
        write_parquet(records(dashboard.telemetry(common, "text")), folder / "r/telemetry/000000-000020.parquet")
        write_parquet(records(dashboard.measured(common, "text")), folder / "r/records/aa-bb.parquet")
        samples = [
            common | {"step": 20, "metric": "loss", "document": i, "value": 4.0 + i, "provenance": "{}"}
            for i in range(9)
        ]
        write_parquet(records(samples, SAMPLE_COLUMNS), folder / "r/records/aa-bb.samples.parquet")
        catalogue(folder)
        write_json(
            folder / STATUS,
            {"finished": True, "elapsed_s": 1.0, "left_s": 0.0, "models": ["r"], "ready": ["r"], "failed": {}},
        )
        write_json(folder / NOTE, {"pid": 2**22 + 1, "port": 8501, "builders": ""})
        return folder / name, lambda: act(folder)

    return make


def listed(runs):
    """What every list of runs begins with: commands, dashboard and verdicts."""
    found, problems = list_runs(runs)
    kept = usable(found)
    entries = catalogue(runs).entries
    assert [Path(e.path).name for e in entries] == [run.name for run in found] or problems
    return kept


def looked_up(runs):
    """The catalogue, which may lean on its index and must not repeat what is false there."""
    found, path = catalogue(runs), runs / INDEX
    path.unlink(missing_ok=True)
    assert found.entries == catalogue(runs).entries, "the index was believed"
    return found


def both_caches(runs):
    """Records and telemetry as commands and pages read them; a run that cannot be read is named."""
    entries = catalogue(runs).entries
    for cache in (RecordCache(), TelemetryCache()):
        _, problems = cache.rows(entries)
        if problems:
            raise BadCheckpoint(str(problems))
    run = Run.open(runs / "r")
    _ = run.telemetry(), load_records([run.path]), run.progress, metrics_of(run.path)
    found, problems = stored(entries)
    if problems:
        raise BadCheckpoint(str(problems))
    return found


def drawn(runs):
    """The figure of a table that somebody hands in."""
    return plots.plot(read_parquet([runs / "r/records/aa-bb.parquet"]))


def prose(file):
    file.write_text("\n\n".join(f"line {i} of the book says {i * i % 97} and no more than that" for i in range(800)))


def stored_corpus(file):
    """A corpus as `prepare` keeps it."""
    prose(file.with_suffix(".txt"))
    save_corpus(from_files([file.with_suffix(".txt")]), file.parent)


def own_tokenizer(file):
    train_tokenizer(["the cat sat on the mat " * 20], 270).save(file)


def with_tokenizer_of_another(file):
    own_tokenizer(file)
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"added_tokens": []}))


def with_tokenizer(file):
    own_tokenizer(file.with_name("tokenizer.json"))
    saved = json.loads(file.with_name("tokenizer.json").read_text())
    saved["added_tokens"] = []  # as another library's
    file.with_name("tokenizer.json").write_text(json.dumps(saved))
    file.write_text(json.dumps({"bos_token": "a", "eos_token": {"content": "b"}}))


STUDY = """
question = "Does the value residual win at every learning rate?"
preset = "tiny"
seeds = [0, 1, 2]
outcome = "formation_step"
baseline = "transformer"
tuned = "lr"
data = { kind = "repeated", vocabulary = 64 }
recipe = { steps = 150 }
grid.recipe.lr = [2e-3, 4e-3]
measure = { metrics = ["sink_mass"], steps = "last", n = 8 }
[[models]]
architecture = "transformer"
[[models]]
architecture = "resformer"
vary.options.lambda_v1 = [0.5, 2]
"""
EDITS = "coefficient:layer=2,source=first,value=0;sink:layer=3;remove:part=mlp,layer=1;values:layer=1,how=zero"
LINK = f"intervene?a=text-resformer-s0&step=20&prompt=return%20values&edits={EDITS}&compare=1&models=resformer"
RUN = {
    "architecture": "resformer", "seed": 0, "model": dashboard.MODEL, "train": dashboard.TRAIN, "data": {"kind": "imported"},
}  # fmt: skip


def text(value):
    return lambda file: file.write_text(value)


PINS = {
    "pins": [{"link": "depth?metric=loss", "view": "layers", "note": "it falls", "kept": "2026-01-01T00:00:00+00:00"}]
}
WORDS = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! the cat sat on the mat"


def encoded(file):
    """A text's ids and their text again; what may take long has a second, not ten."""
    with patch.object(tokenizer_limits, "SECONDS", 1):
        tokenizer = load_tokenizer(file)
        ids = tokenizer.encode(WORDS)
        assert len(ids) >= len(WORDS.split()), "the text was cut"
        return tokenizer.decode(ids)


def taken_along(file):
    """Pins as the notes and the notebook that somebody takes along."""
    kept = pins.pins(file.parent)
    notes = pins.markdown(file.parent, kept)
    told = [line for line in notes.splitlines() if not line.startswith("      ")]  # else code
    assert not any(re.search(r"(?<!\\)[<`\[]", line) for line in told), "Markdown was left in"
    return notes, pins.notebook(file.parent, kept)


def prompts(file):
    examples.cache_clear()
    with patch("workbench.data.example_prompts.SHIPPED", file.parent):
        return examples()


def at_a_url(file):
    """The runs of a folder at a URL with objects of these names, every third of which cannot be read."""
    store, names = MemoryFileSystem.store, json.loads(file.read_bytes())
    store.clear()
    for number, name in enumerate(names):
        store[f"/bucket/runs/{name}"] = MemoryFile(
            None, f"/bucket/runs/{name}", json.dumps(RUN).encode() if number % 3 else b"{"
        )
    return _listed_from(file)


def _listed_from(file):
    mirror.forget()
    with patch.dict(os.environ, {"WORKBENCH_CACHE": str(file.parent / f"cache{random.random()}")}):
        return list_runs("memory://bucket/runs")


def bookkept(kind):
    """A mirror's bookkeeping: what it notes of a run, or the URL that it stands for."""

    def make(_, folder):
        def look():
            mirror.forget()
            with patch.dict(os.environ, {"WORKBENCH_CACHE": str(folder)}):
                return [list_runs("memory://bucket/runs"), mirror.trim(folder)]

        store = MemoryFileSystem.store
        store.clear()
        for name in NAMES:
            store[f"/bucket/runs/{name}"] = MemoryFile(None, f"/bucket/runs/{name}", json.dumps(RUN).encode())
        look()
        return next(folder.glob(f"mirrors/*/.remote/{kind}")), look

    return make


LOG = pd.DataFrame(
    {"step": range(0, 200, 10), "train_loss": np.linspace(9, 4, 20), "val_loss": np.linspace(9.1, 4.2, 20)}
)
LINES = "".join(
    f"step {r.step}: train loss {r.train_loss:.4f}, val loss {r.val_loss:.4f}\niter {r.step}: loss {r.train_loss:.4f}, time 9.25ms\n"
    for r in LOG.itertuples()
)
HISTORY = {
    "global_step": 190, "log_history": [{"step": 10 * i, "epoch": i / 10, "loss": 9 - i / 4, "learning_rate": 1e-3} for i in range(20)],
}  # fmt: skip


def with_events(file):
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(file.parent / "events")) as writer:
        for row in LOG.itertuples():
            writer.add_scalar("train/loss", row.train_loss, row.step)
    (made,) = (file.parent / "events").iterdir()
    made.rename(file)


def imported(file):
    """A training log as runs, whose numbers are read again."""
    runs = file.parent / f"runs{len(list(file.parent.iterdir()))}"
    for run in import_logs([file], runs, name="log").runs:
        run.telemetry()


SIDE = {
    "tokenizer": (reader(own_tokenizer, "tokenizer.json", load_tokenizer), mutated),
    "llama2.c's tokenizer": (
        reader(lambda f: llama2c_files.tokens(f, [("the", -1.0)]), "tok.bin", lambda f: read_tokenizer(f, 260)), mutated,
    ),
    "tokenizer's settings": (reader(with_tokenizer, SETTINGS, lambda f: load_tokenizer(f.with_name("tokenizer.json"))), mutated),
    "tokenizer's patterns": (reader(with_tokenizer_of_another, "tokenizer.json", encoded), in_patterns),
    "pins": (reader(text(json.dumps(PINS)), pins.FILE, taken_along), in_pins),
    "prompts": (reader(lambda f: f.write_bytes((SHIPPED / "prompts.toml").read_bytes()), "prompts.toml", prompts), mutated),
    "names at a URL": (reader(text(json.dumps(NAMES)), "names.json", at_a_url), in_names),
    "notes of a mirror": (bookkept("r.json"), mutated),
    "URL of a mirror": (bookkept("url"), in_text),
    "text": (reader(prose, "book.txt", lambda f: from_files([f])), mutated),
    "JSON Lines": (
        reader(text("\n".join(json.dumps({"text": f"{i} words " * 200}) for i in range(40))), "rows.jsonl", lambda f: from_files([f])),
        mutated,
    ),
    "Parquet": (
        reader(
            lambda f: pd.DataFrame({"text": [" ".join(f"w{i * j}" for j in range(300)) for i in range(40)]}).to_parquet(f),
            "rows.parquet", lambda f: from_files([f]),
        ), mutated,
    ),
    "log of nanoGPT": (reader(text(LINES), "train.log", imported), mutated),
    "trainer_state.json": (reader(text(json.dumps(HISTORY)), "trainer_state.json", imported), mutated),
    "values of a trainer_state.json": (reader(text(json.dumps(HISTORY)), "trainer_state.json", imported), in_values),
    "log as CSV": (reader(lambda f: LOG.to_csv(f, index=False), "metrics.csv", imported), mutated),
    "log as Parquet": (reader(lambda f: LOG.to_parquet(f), "log.parquet", imported), mutated),
    "event file": (reader(with_events, "events.out.tfevents.1", imported), mutated),
    "token ids": (reader(lambda f: np.arange(4000, dtype="<u2").tofile(f), "ids.bin", lambda f: read_tokens(f, 4000)), mutated),
    "corpus": (reader(stored_corpus, "corpus/documents.parquet", lambda f: load_corpus(f.parent)), mutated),
    "corpus's manifest": (reader(stored_corpus, "corpus/manifest.json", lambda f: load_corpus(f.parent)), mutated),
    "run.json": (reader(text(json.dumps(RUN)), "run.json", lambda f: Run.open(f.parent)), mutated),
    "run.json of a run with numbers": (in_run("r/run.json", listed), mutated),
    "values of a run.json": (in_run("r/run.json", listed), in_values),
    "records": (in_run("r/records/aa-bb.parquet", both_caches), mutated),
    "samples": (in_run("r/records/aa-bb.samples.parquet", both_caches), mutated),
    "telemetry": (in_run("r/telemetry/000000-000020.parquet", both_caches), mutated),
    "records to be drawn": (in_run("r/records/aa-bb.parquet", drawn), mutated),
    "catalogue's index": (in_run(INDEX, looked_up), mutated),
    "values of a catalogue's index": (in_run(INDEX, looked_up), in_entries),
    "demo's status": (in_run(STATUS, demo_status), mutated),
    "dashboard's note": (in_run(NOTE, lambda runs: running_note(runs, 8501)), mutated),
    "study": (reader(text(STUDY), "study.toml", read_study), mutated),
    "edits": (reader(text(EDITS), "edits.txt", lambda f: parsed(f.read_text(errors="replace"))), mutated),
    "link": (reader(text(LINK), "link.txt", lambda f: Link.parse(f.read_text(errors="replace"))), mutated),
}  # fmt: skip


def opened(make):
    """A checkpoint as `load` opens it."""

    def form(tiny, folder):
        file, path = make(tiny, folder)
        return file, lambda: workbench.load(path, config={})

    return form


def state(tiny, folder):
    """Tensors for a module of one's own."""
    file = folder / "a.pt"
    torch.save({"a": torch.ones(3, 4).T, "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(1)}, file)
    return file, lambda: read_state(file)


STATES = {"state dict": (state, mutated), "pickle of a state dict": (state, in_pickle)}
FORMS = {name: (opened(make), damage) for name, (make, damage) in LOADED.items()} | STATES | SIDE
"""Every form: what makes a sound file and what reads it, and how it is damaged."""
