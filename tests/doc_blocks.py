"""Runs the Python of a documentation page from top to bottom: `python doc_blocks.py FOLDER PAGE...`, in a folder of its own each.

A block that begins with `# path/of/a_file.py` is that file. A `text` block after Python is what it printed. What needs a package that
is not installed here is compiled. `GIVEN` is what a page supposes that its reader has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import traceback
from pathlib import Path

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import workbench
from workbench.data.data_sources import RepeatedData
from workbench.models import architectures

BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.py)\b")
SHAPE = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 61, "n_ctx": 64}
VOCABULARY = 61


class Bucket(MemoryFileSystem):
    """A bucket in this process's memory."""

    protocol = "s3"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("s3://", "memory://"))


def ids(rows: int = 4, length: int = 24) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape)).eval()


def observing() -> dict[str, object]:
    return {"module": llama(), "other_model": llama(), "example_tokens": ids(), "tokens": ids()}


def recorder() -> dict[str, object]:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"workbench": workbench, "model": model, "optimizer": optimizer, "loader": [ids(), ids()]}


def checkpoints() -> dict[str, object]:
    for step in (250, 500):
        llama().save_pretrained(f"out/checkpoint-{step}")
        Path("theirs").mkdir(exist_ok=True)
        torch.save(llama().state_dict(), f"theirs/model_{step:06d}.pt")
    torch.save(llama().state_dict(), "ckpt.pt")
    return {}


def dashboard() -> dict[str, object]:
    return {}


def storage() -> dict[str, object]:
    """A run in a bucket."""
    fsspec.register_implementation("s3", Bucket, clobber=True)
    os.environ["WORKBENCH_CACHE"] = str(Path.cwd() / "cache")
    train = workbench.PRESETS["tiny"].train.replace(steps=1, batch=2, T=16, warmup=1)
    config = workbench.ModelConfig.of("tiny").replace(**SHAPE | {"d_vocab": 64})
    workbench.train("resformer", RepeatedData(), name="resformer-tiny-s0", runs="runs", model=config, train=train)
    Bucket().put("runs/", "/bucket/runs/", recursive=True)
    return {"workbench": workbench}


def transformerlens() -> dict[str, object]:
    model = workbench.build("resformer", SHAPE, seed=0)
    return {
        "workbench": workbench,
        "model": model,
        "tokens": ids(),
        "cache": model.run_with_cache(ids())[1],
        "a": 3,
        "b": 5,
    }


GIVEN = {given.__name__: given for given in (observing, recorder, checkpoints, dashboard, storage, transformerlens)}


def run(page: Path, folder: Path) -> None:
    """Raise where a block does, or prints something else than the page says."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    names, printed = {"__name__": "page", **GIVEN.get(page.stem, dict)()}, None
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "text":
            if printed is not None and printed != text:
                raise AssertionError(f"it prints\n{printed}\nand not\n{text}")
            printed = None
            continue
        code, said = compile(text, page.name, "exec"), io.StringIO()
        if file := FILE.match(text):
            Path(Path(file[1]).name).write_text(text)
            continue
        imported = re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)
        if all(importlib.util.find_spec(name) for name in imported):
            with contextlib.redirect_stdout(said):
                exec(code, names)
        printed = said.getvalue()


def main(folder: str, *pages: str) -> None:
    place, failed = Path(folder).resolve(), 0
    paths = [Path(page).resolve() for page in pages]
    for path in paths:
        architectures.__path__.append(str(place / path.stem))  # where a page writes an architecture's file
        try:
            run(path, place / path.stem)
        except Exception:
            failed += 1
            print(f"{path.name}: {traceback.format_exc(limit=-2)}")
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
