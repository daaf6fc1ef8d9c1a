"""TensorBoard's event files: records of a protocol buffer with step, tag and value (extra `tensorboard`).

    length (8 bytes) | checksum (4) | event | checksum (4)

Source: tensorflow, record_writer.h and event.proto.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.checkpoints.training_logs.quantity_names import plain_name, quantity
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader, of_evaluation
from workbench.errors import BadData
from workbench.file_io import open_regular
from workbench.places import install

LARGEST = 1 << 26  # bytes of an event with a number; pictures and graphs are skipped unread
FLOAT = 1  # of the enumeration DataType
PART = re.compile(r"(?:.*loss_)?(?P<name>train|training|val|valid|validation|eval|evaluation|test)", re.IGNORECASE)
"""Folders whose name says which loss a tag `loss` is: Keras writes `train` and `validation`, `add_scalars` writes `loss_train`."""


def _read(path: Path, numbers: LogNumbers) -> None:
    numbers.by_quantity = True
    part = PART.fullmatch(path.parent.name)
    numbers.evaluation = part is None and of_evaluation(path)
    scalars, results = list[tuple[str, int, float, float]](), set[str]()  # tag, step, number and time
    for event in _events(path, numbers):
        if event.session_log.status == 1:  # START
            own = {quantity(_name(tag, part))[0] for folder, tag in numbers.clock if folder == path.parent}
            numbers.forget_from(event.step, own)
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "hparams":
                results |= _hyperparameter_results(value.metadata.plugin_data.content)
            scalar = _scalar(value)
            if scalar is not None and value.tag in results:
                results.remove(value.tag)
                numbers.skipped[f"{value.tag} beside hyperparameters is a result of no step, or none yet"] += 1
            elif scalar is not None:
                scalars.append((value.tag, event.step, scalar, event.wall_time))
    tags = {tag for tag, *_ in scalars}
    tag = next(iter(tags), "")
    group = path.parent.name.startswith(f"{tag.replace('/', '_')}_") or path.parents[1].name == tag
    if group and len(tags) == 1 and not part:  # of `add_scalars`
        numbers.skipped[f"{tag} in {path.parent.name} is one of a group of scalars"] += len(scalars)
        return
    for tag, step, scalar, time in scalars:
        if time < numbers.clock.get((path.parent, tag), 0.0):
            raise BadData(
                f"{path} and another event file of its folder have {tag} of the same time; import one of them"
            )
        numbers.add(step, _name(tag, part), scalar, time=time)
    numbers.clock |= {(path.parent, tag): time for tag, *_, time in scalars}


def _name(tag: str, part: re.Match[str] | None) -> str:
    """Return a tag's name, after its folder's name for a plain loss."""
    return f"{part['name']}/{tag}" if part and plain_name(tag) == "loss" else tag


def _hyperparameter_results(content: bytes) -> set[str]:
    """Return the tags that the plugin of hyperparameters lists as results."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    with suppress(DecodeError):  # of another version
        return {info.name.tag for info in HParamsPluginData.FromString(content).experiment.metric_infos}
    return set()


def _events(path: Path, numbers: LogNumbers) -> Iterator[Any]:
    """Yield the events of a file; raises `BadData` for a damaged one. The last event may be cut off, which is counted."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c
    except ImportError:
        raise BadData(f"{path} needs tensorboardX: {install('tensorboard')}") from None
    with open_regular(path) as file:
        while len(head := file.read(12)) == 12:
            damaged = BadData(f"{path} is damaged at byte {file.tell() - 12}; copy it again")
            size, checksum = struct.unpack("<QI", head)
            if checksum != masked_crc32c(head[:8]):
                raise damaged
            if size > LARGEST:
                file.seek(size + 4, 1)
                continue
            data, end = file.read(size), file.read(4)
            if len(end) < 4:
                numbers.skipped["the last event is cut off"] += 1
                break
            try:
                event = Event.FromString(data)
            except DecodeError:
                raise damaged from None
            if event.summary.value and struct.unpack("<I", end)[0] != masked_crc32c(data):
                raise damaged
            yield event


def _home(path: Path) -> Path:
    """Return the folder of a run, above its parts such as `train` or tensorboardX's `loss/train`."""
    if not PART.fullmatch(path.parent.name):
        return path.parent
    return path.parents[2 if path.parents[1].name.lower() == "loss" else 1]


def _scalar(value: object) -> float | None:
    """Return the number of a summary value in either of its two encodings; None for other summaries."""
    which = value.WhichOneof("value")  # type: ignore[attr-defined]
    if which == "simple_value":
        return float(value.simple_value)  # type: ignore[attr-defined]
    tensor = value.tensor if which == "tensor" else None  # type: ignore[attr-defined]
    if tensor is None or tensor.dtype != FLOAT or tensor.tensor_shape.dim:
        return None
    if tensor.float_val:
        return float(tensor.float_val[0])
    return float(struct.unpack("<f", tensor.tensor_content)[0]) if len(tensor.tensor_content) == 4 else None


READER = LogReader("TensorBoard events", lambda path, head: "tfevents" in path.name, _read, home=_home)
