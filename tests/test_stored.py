"""Tensors as they lie in files: read whole and once, in their own or another type, and held against the files' checksums."""

from __future__ import annotations

import json

import pytest
import torch
from foreign import rezipped
from safetensors.torch import save_file

from workbench.checkpoints import stored_tensors as module
from workbench.checkpoints.checkpoint_facts import whole_number
from workbench.checkpoints.loading import read_state
from workbench.checkpoints.paths import Checkpoint
from workbench.checkpoints.safe_unpickling import unpickle
from workbench.checkpoints.safetensors_files import safetensors_table
from workbench.checkpoints.state_dicts import read
from workbench.errors import BadCheckpoint

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def put(path, tensors, form):
    if form == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return read(Checkpoint(path)).tensors


@pytest.mark.parametrize("form", ["safetensors", "pt"])
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_are_read_in_their_own_type_or_the_one_asked_for(tmp_path, monkeypatch, form, dtype):
    """Read in pieces of 64 bytes, so that a tensor is several and the last of them is shorter."""
    monkeypatch.setattr(module, "CHUNK", 64)
    a = torch.linspace(-3, 3, 7 * 11, dtype=torch.float64).to(dtype).reshape(7, 11)
    tensors = {
        "first": torch.ones(3, dtype=dtype),
        "a": a,
        "none": torch.ones(0, 4, dtype=dtype),
        "one": a[2, 3].clone(),
    }
    found = put(tmp_path / f"a.{'safetensors' if form == 'safetensors' else 'pt'}", tensors, form)
    for name, wanted in tensors.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tuple(wanted.shape))
        for other in (None, *TYPES):
            read_as = found[name].read(name, other)
            assert read_as.dtype == (other or dtype)
            assert torch.equal(read_as, wanted.to(other or dtype))
        found[name].check(name)


@pytest.mark.parametrize("place", [0, 40, 76])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_one_number_that_is_none_is_found_wherever_it_stands(tmp_path, monkeypatch, form, place):
    monkeypatch.setattr(module, "CHUNK", 64)
    for value, told in ((float("nan"), "a holds NaN"), (float("inf"), "a holds Inf"), (-float("inf"), "a holds Inf")):
        a = torch.ones(77)
        a[place] = value
        found = put(tmp_path / f"a.{'safetensors' if form == 'safetensors' else 'pt'}", {"a": a}, form)["a"]
        for reading in (found.read, found.check, lambda name, f=found: f.read(name, torch.float64)):
            with pytest.raises(BadCheckpoint, match=told):
                reading("a")


def test_numbers_of_eight_bits_are_read_and_whole_numbers_have_no_nan(tmp_path):
    eight = torch.tensor([1.0, -2.0, 448.0]).to(torch.float8_e4m3fn)
    found = put(tmp_path / "a.safetensors", {"a": eight, "n": torch.tensor([2**40, -1])}, "safetensors")
    assert found["a"].read("a", torch.float32).tolist() == [1.0, -2.0, 448.0]
    assert found["n"].read("n").tolist() == [2**40, -1]
    bad = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    with pytest.raises(BadCheckpoint, match="NaN"):
        put(tmp_path / "b.safetensors", {"a": bad}, "safetensors")["a"].read("a")


def test_a_file_that_was_cut_after_it_was_opened_is_said_to_be(tmp_path):
    path = tmp_path / "a.safetensors"
    found = put(path, {"a": torch.ones(100)}, "safetensors")["a"]
    whole = path.read_bytes()
    assert found.read("a").sum() == 100
    path.write_bytes(whole[:-1])
    with pytest.raises(BadCheckpoint, match="ends inside a: it is cut off"):
        found.read("a")
    path.unlink()
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        found.check("a")


def test_views_of_one_storage_take_its_place_and_no_more(tmp_path):
    """The last element of a stepped view is the storage's last: a span one longer would not be in the file."""
    base = torch.arange(24.0).reshape(4, 6)
    views = {"t": base.T, "step": base[:, 1::2], "last": base[3:, 5:], "row": base[1], "whole": base, "same": base}
    found = put(tmp_path / "a.pt", views, "pt")
    assert {name: found[name].span for name in views} == {
        "t": 24,
        "step": 23,
        "last": 1,
        "row": 6,
        "whole": 24,
        "same": 24,
    }
    for name, view in views.items():
        read_back = found[name].read(name)
        assert torch.equal(read_back, view)
        assert read_back.is_contiguous()
    assert found["whole"].place == found["same"].place
    assert len({found[name].place for name in views}) == 5


def test_a_file_that_is_not_there_is_missing_and_a_folder_is_no_file(tmp_path):
    for path in (tmp_path / "a.pt", tmp_path):
        for opened in (unpickle, safetensors_table):
            with pytest.raises(BadCheckpoint, match=f"{path.name} is missing"):
                opened(path)


def flipped(path, tensor):
    """One bit of a tensor's bytes in the file is another."""
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(data)


def test_the_checksum_of_each_tensor_and_of_the_names_is_held_against_the_bytes(tmp_path):
    path = tmp_path / "a.pt"
    tensors = {name: torch.arange(40.0) + 100 * i for i, name in enumerate("abc")}
    for tensor in tensors.values():
        torch.save(tensors, path)
        flipped(path, tensor)
        with pytest.raises(BadCheckpoint, match=r"a\.pt is damaged.*Bad CRC-32.*copy it again"):
            read_state(path)
    torch.save(tensors, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x01\x00\x00\x00aq", b"\x01\x00\x00\x00zq", 1))
    assert path.read_bytes() != data
    with pytest.raises(BadCheckpoint, match="Bad CRC-32"):
        unpickle(path)
    path.write_bytes(rezipped(data, lambda name, record: record))
    assert torch.equal(read_state(path)[0]["b"], tensors["b"])


@pytest.mark.parametrize(("depth", "fits"), [(50, True), (51, False)])
def test_containers_are_followed_fifty_deep(tmp_path, depth, fits):
    nested: object = 7
    for _ in range(depth - 1):
        nested = [nested]
    torch.save({"deep": nested, "weights": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    if fits:
        assert unpickle(tmp_path / "a.pt")["deep"] == nested
    else:
        with pytest.raises(BadCheckpoint, match="more than 50 deep"):
            unpickle(tmp_path / "a.pt")


def test_a_sparse_tensor_is_refused_by_its_layout(tmp_path):
    torch.save({"a": torch.eye(3).to_sparse(), "b": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=r"torch\.sparse_coo is not read; save it dense"):
        read_state(tmp_path / "a.pt")


def test_a_type_that_is_not_read_is_refused_by_name_and_the_list_of_those_that_are(tmp_path):
    header = json.dumps({"a": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BadCheckpoint, match="a is U16; read are F64, F32"):
        safetensors_table(path)


@pytest.mark.parametrize(
    ("value", "step"), [(0, 0), (7, 7), (-1, None), (True, None), (2.0, None), ("7", None), (None, None)]
)
def test_a_step_is_a_whole_number_from_zero_on(value, step):
    assert whole_number(value) == step
