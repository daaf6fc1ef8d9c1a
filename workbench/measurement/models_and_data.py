"""Subjects of a measurement (a run at a step, or a model in memory) and their data (ids, text, files or a corpus)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench import distributed
from workbench.checkpoints.saving import weights_hash
from workbench.config import ModelConfig
from workbench.data.corpus import Corpus, is_named, read_documents
from workbench.data.data_sources import Sample, TextData, TokenData
from workbench.data.token_shards import read_tokens
from workbench.errors import BadData, OnlyHere, WorkbenchError
from workbench.file_io import local
from workbench.models.hooked import HookedModel, id_table, refuse_ids
from workbench.models.transformer import Transformer
from workbench.runs.run import Run, run_or_model
from workbench.storage.mirror import push
from workbench.storage.path_or_url import locate

_memory: dict[tuple[str, str, str], pd.DataFrame] = {}
"""Records of models in memory by (weights, data, key); the oldest are removed first."""
MAX_REMEMBERED = 256
FILES = (".txt", ".md", ".py", ".parquet", ".json", ".jsonl", ".bin")
SHORT = 6  # characters of a content hash in names of data and of models in memory
Tables = tuple[pd.DataFrame, pd.DataFrame]  # records, and one value per document


@dataclass
class Subject:
    """One set of weights: a run at a step, or a model in memory (then `run` has the value None)."""

    run: Run | None = None
    step: int = 0
    device: str | None = None
    in_hand: Transformer | None = None
    number: int = 1  # among observed models of one call with equal weights, which may differ in `call=`
    only_here: OnlyHere | None = None  # error of a failed upload, raised after everything is measured
    absent: dict[str, str] = field(default_factory=dict)  # reasons of measurements without numbers, by name

    @cached_property
    def model(self) -> Transformer:
        """The model; a run's model is loaded on first use."""
        if self.in_hand is not None:
            return self.in_hand
        assert self.run is not None
        return self.run.load(self.step, device=self.device)

    def forget(self) -> None:
        """Free a loaded model, since a series is measured one step at a time."""
        self.__dict__.pop("model", None)

    @cached_property
    def weights(self) -> str:
        """Content address of the weights, computed without loading a run's model."""
        return weights_hash(self.model) if self.run is None else self.run.weights_hash(self.step)

    @property
    def axes(self) -> dict[str, Any]:
        """Columns of records that identify the subject."""
        if self.run is not None:
            run = self.run
            return {"run": run.name, "architecture": run.architecture, "seed": run.seed, "step": self.step}
        source, architecture = self.model.source, self.model.architecture
        name = source.get("run") or source.get("path") or "in memory"
        if self.model.foreign is not None or name == "in memory":  # several models may share a class
            name = f"{name} {self.weights[:SHORT]}" + (f" ({self.number})" if self.number > 1 else "")
        return {"run": name, "architecture": architecture, "seed": source.get("seed"), "step": source.get("step")}

    @property
    def is_hooked(self) -> bool:
        """True if hooks of the caller change the computation, so that numbers must not be stored."""
        if getattr(self.in_hand, "foreign", None) is not None:
            return True  # the code of an observed module may differ for equal weights
        points = self.model.hook_dict.values() if self.run is None else ()
        return any(point._forward_hooks or point._backward_hooks for point in points)

    def get(self, sample: Sample, keys: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Return the stored records of these measurement keys."""
        stored = {} if self.run is None else self.run.store.get(self.weights, sample.hash, keys)
        frames = {} if self.is_hooked else {key: _memory.get((self.weights, sample.hash, key)) for key in keys}
        return {key: frame for key, frame in frames.items() if frame is not None} | stored

    def put(self, sample: Sample, tables: Mapping[str, Tables]) -> None:
        """Store records by key: a run's in its folder, a model's or shipped run's in this process."""
        if self.run is not None and not self.run.shipped:
            frames, samples = zip(*tables.values(), strict=True)
            both = pd.concat(frames, ignore_index=True), pd.concat(samples, ignore_index=True)
            self.run.store.put(self.weights, sample.hash, *both)
        elif not self.is_hooked:
            for key, (frame, _) in tables.items():
                while len(_memory) >= MAX_REMEMBERED:
                    del _memory[next(iter(_memory))]
                _memory[self.weights, sample.hash, key] = frame

    def send(self) -> None:
        """Upload the records of a run whose folder mirrors a URL, also after a failed upload."""
        if self.run is not None and not self.run.shipped and distributed.rank() == 0:
            try:
                push(self.run.store.folder)
            except OnlyHere as error:
                self.only_here = error


def subjects(things: Any, steps: str | int | list[int], device: str | None) -> list[Subject]:
    """Return the subjects of a model, a run, a path, or a list of them; `steps` applies to runs."""
    result: list[Subject] = []
    for thing in things if isinstance(things, list | tuple) else [things]:
        opened = run_or_model(thing, device)
        if isinstance(opened, Run):
            result += [Subject(opened, step, device) for step in opened.resolve(steps)]
        elif isinstance(opened, HookedModel):
            result.append(Subject(in_hand=cast(Transformer, opened)))  # an observed module is used alike
        else:
            raise WorkbenchError(f"cannot measure a {type(thing).__name__}; give a model, a run or a path")
    alike: dict[str, dict[int, int]] = {}
    for subject in result:
        if subject.in_hand is not None and subject.in_hand.foreign is not None:
            numbers = alike.setdefault(subject.weights, {})
            subject.number = numbers.setdefault(id(subject.in_hand), len(numbers) + 1)
    if not result:
        raise WorkbenchError("nothing to measure: no models or runs were given")
    return result


def opened_run(thing: Any) -> Run:
    """Return the run of a path or a `Run`; raises `WorkbenchError` for anything other processes could not open."""
    if isinstance(thing, str | Path) and (location := locate(thing)).is_run:
        return Run.open(location)
    if isinstance(thing, Run):
        return thing
    what = thing if isinstance(thing, str | Path) else f"a {type(thing).__name__}"
    raise WorkbenchError(f"{what} is no run: leave out workers=, or import it as one")


def sample_of(data: Any, subject: Subject, n: int, T: int | None, seed: int) -> Sample:
    """Return sequences from ids [n, T], text, a path, a corpus, or (None) the run's validation split."""
    if isinstance(data, Sample):
        return data
    if isinstance(data, Tensor | np.ndarray | list | tuple):
        return _ids(data, T)
    # Path.exists raises for texts too long to be a name
    if isinstance(data, str) and not (is_named(data) or (data and os.path.exists(data))):  # noqa: PTH110
        if not any(c.isspace() for c in data) and local(data).suffix in FILES:
            raise BadData(f"{data} does not exist; give text, or the path of a file that is there")
        ids, start = _tokenizer(subject, "text").encode(data), _start_token(subject)
        return _ids([ids if start is None else [start, *ids]], T, "text")
    if data is None and subject.run is None:
        raise WorkbenchError(
            "a model without its run has no data of its own: give data= (ids, text, a path, a corpus), or the run and steps="
        )
    name = Path(data).name or str(data) if isinstance(data, str | Path) else type(data).__name__.lower()
    if isinstance(data, str | Path) and Path(data).suffix == ".bin":
        ids = read_tokens(Path(data), _config(subject).d_vocab)
        data = TokenData(ids[:0], ids, _config(subject).d_vocab, (str(data),))
    if isinstance(data, str | Path):
        documents, files = read_documents([data], split="validation")
        data = Corpus(tuple(documents), {"files": files})
    if isinstance(data, Corpus):
        data = TextData(data, _tokenizer(subject, "a corpus"), None if _start_token(subject) is None else "each")
    source = subject.run.data if data is None and subject.run is not None else data
    if not hasattr(source, "batch"):
        raise BadData(f"cannot read data from a {type(data).__name__}; give ids [n, T], text, a path or a corpus")
    length = subject.run.train.T if subject.run is not None else min(128, subject.model.config.n_ctx)
    sample = source.sample(n, T or length, seed=seed)
    if data is None or (subject.run is not None and source.hash == subject.run.info["data"].get("hash")):
        return sample  # the run's own
    content = source.corpus.hash if isinstance(source, TextData) else source.hash
    return replace(sample, label=f"{name} {content[:SHORT]}")


def refuse_unfit(sample: Sample, subject: Subject) -> None:
    """Raise `BadData` if a model cannot read the sequences."""
    config, T = _config(subject), sample.ids.shape[1]
    refuse_ids(sample.ids, config.d_vocab)
    if config.n_ctx < T:
        raise BadData(f"T={T} exceeds the model's context n_ctx={config.n_ctx}; choose a smaller T")


def _config(subject: Subject) -> ModelConfig:
    return subject.run.model if subject.run is not None else subject.model.config


def _tokenizer(subject: Subject, what: str) -> Any:
    tokenizer = subject.run.tokenizer if subject.run is not None else subject.model.tokenizer
    if tokenizer is None:
        raise BadData(f"this model has no tokenizer: give token ids instead of {what}")
    return tokenizer


def _start_token(subject: Subject) -> int | None:
    return (subject.run or subject.model).start_token


def _ids(data: Any, T: int | None, label: str = "ids") -> Sample:
    """Return rows of ids, cut to T tokens if it is given."""
    ids = id_table(data, label)
    if ids.shape[1] < max(T or 2, 2):
        raise BadData(f"the {label} is {ids.shape[1]} tokens long; at least {max(T or 2, 2)} are needed")
    sample = Sample(ids[:, :T].to("cpu", torch.long).contiguous(), range(len(ids)), label)
    return replace(sample, label=f"{label} {sample.hash[:SHORT]}")
