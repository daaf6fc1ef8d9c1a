"""TensorBoard's event files: records of a protocol buffer with step, tag and value (extra `tensorboard`).

    length (8 bytes) | checksum (4) | event | checksum (4)

Source: tensorflow, record_writer.h and event.proto.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from workbench.checkpoints.training_logs.quantity_names import plain_name
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader, of_evaluation
from workbench.errors import BadData
from workbench.file_io import open_regular
from workbench.places import install

LARGEST = 1 << 26  # bytes of an event with a number; pictures and graphs are skipped unread
FLOAT = 1  # of the enumeration DataType
PART = re.compile(r"(?:.*loss_)?(?P<name>train|training|val|valid|validation|eval|evaluation|test)", re.IGNORECASE)
"""Folders whose name says which loss a tag `loss` is: Keras writes `train` and `validation`, `add_scalars` writes `loss_train`."""


def _read(path: Path, numbers: LogNumbers) -> None:
    try:
        from google.protobuf.message import DecodeError
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c
    except ImportError:
        raise BadData(f"{path} needs tensorboardX: {install('tensorboard')}") from None
    numbers.by_quantity = True
    part = PART.fullmatch(path.parent.name)
    numbers.evaluation = part is None and of_evaluation(path)
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
            for value in event.summary.value:
                scalar = _scalar(value)
                if scalar is not None:
                    bare = part and plain_name(value.tag) == "loss"
                    numbers.add(event.step, f"{part['name']}/{value.tag}" if part and bare else value.tag, scalar)


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


READER = LogReader(
    "TensorBoard events", lambda path, head: "tfevents" in path.name, _read,
    home=lambda path: path.parents[1] if PART.fullmatch(path.parent.name) else path.parent,  # of training and validation
)  # fmt: skip
