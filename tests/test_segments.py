"""Which positions of a row are padding, and which belong to one document, by what an attention hides and by given masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.errors import BadData, WorkbenchError
from workbench.observing.interception.documents_and_labels import SeenMasks

T = 8
QUERY, KEY = torch.arange(T)[:, None], torch.arange(T)[None]
LEFT = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
MIDDLE = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1])
PACKED = torch.tensor([1, 1, 1, 2, 2, 2, 2, 2])


def read(*masks, tokens=None, **arguments):
    """Segment ids of one row under masks [query, key] and the arguments that its module was given."""
    seen = SeenMasks((torch.arange(1, T + 1) if tokens is None else tokens)[None])
    seen.given(Takes(), (), arguments)
    for mask in masks:
        seen.add(None if mask is None else (mask & (KEY <= QUERY))[None, None])
    return seen.segments()


class Takes(nn.Module):
    def forward(self, ids=None, attention_mask=None, key_padding_mask=None, labels=None, head_mask=None):
        return ids


def hides(text, *, itself):
    return text.bool()[KEY] | ((QUERY == KEY) if itself else torch.zeros(T, T, dtype=torch.bool))


@pytest.mark.parametrize("itself", [False, True], ids=["padding sees nothing", "padding sees itself"])
@pytest.mark.parametrize("text", [LEFT, LEFT.flip(0), MIDDLE], ids=["left", "right", "middle"])
def test_padding_is_found_by_what_the_attention_hides(text, itself):
    tokens = torch.arange(1, T + 1) * text  # padding repeats a token
    assert read(hides(text, itself=itself), tokens=tokens).ids[0].equal(text)


@pytest.mark.parametrize("window", [T, 2])
def test_documents_of_a_packed_row_are_told_apart(window):
    segments = read((PACKED[QUERY] == PACKED[KEY]) & (window > QUERY - KEY))
    assert segments.ids[0].equal(PACKED)
    assert [(row, list(positions)) for row, positions in segments.documents()] == [(0, [0, 1, 2]), (0, [3, 4, 5, 6, 7])]
    assert segments.first[0].tolist() == [0, 0, 0, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "mask",
    [None, QUERY - KEY < 3, (QUERY - KEY) % 2 == 0, QUERY > KEY, (QUERY - KEY < 3) | (KEY < 1)],
    ids=["causal", "window", "dilated", "not itself", "window and first tokens"],
)
def test_masks_of_the_model_itself_leave_rows_whole(mask):
    assert read(mask).is_whole


def test_layers_that_see_across_chunks_make_the_row_one_document():
    assert not read(PACKED[QUERY] == PACKED[KEY]).is_whole
    assert read(PACKED[QUERY] == PACKED[KEY], None).is_whole


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": LEFT[None]}, {"attention_mask": LEFT[None].bool()}, {"attention_mask": LEFT[None].float()},
        {"attention_mask": (LEFT[None] - 1.0) * 1e9}, {"key_padding_mask": LEFT[None] == 0},
        {"attention_mask": hides(LEFT, itself=True)[None, None]},
    ],
    ids=["long", "bool", "float", "added", "True hides", "of four axes"],
)  # fmt: skip
def test_a_given_mask_says_what_padding_is(given):
    assert read(**given).ids[0].equal(LEFT)
    assert read(hides(LEFT, itself=True), **given).ids[0].equal(LEFT)


def test_a_last_padding_that_sees_itself_is_known_by_the_given_mask_or_its_token():
    text = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0])
    mask = hides(text, itself=True)
    assert read(mask, attention_mask=text[None]).ids[0].equal(text)
    assert read(mask, tokens=torch.tensor([5, 6, 7, 8, 9, 0, 0, 0])).ids[0].equal(text)


@pytest.mark.parametrize(
    ("labels", "counted"), [([-100] * 4 + [5, 6, 7, 8], [0] * 4 + [1] * 4), (list(range(1, 9)), None)]
)
def test_labels_say_which_tokens_count(labels, counted):
    segments = read(None, labels=torch.tensor([labels]))
    assert segments.is_whole == (counted is None)
    assert counted is None or segments.counted[0].tolist() == counted


def test_labels_of_the_next_position_count_the_token_after_it():
    segments = read(None, labels=torch.tensor([[-100, -100, 4, 5, 6, 7, 8, 9]]))
    assert segments.counted[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("error", "masks", "given", "words"),
    [
        (BadData, [hides(LEFT * 0, itself=False)], {}, "padding alone"),
        (BadData, [hides(LEFT * 0, itself=True)], {}, "padding alone"),
        (BadData, [None], {"attention_mask": LEFT[None] * 0}, "padding alone"),
        (WorkbenchError, [((QUERY - KEY) % 2 == 0) | (QUERY == 5)], {}, "neither padding nor packed"),
        (WorkbenchError, [None], {"attention_mask": MIDDLE[None]}, "attention_mask hides"),
        (WorkbenchError, [None], {"labels": torch.tensor([[-100, 9, 9, 1, 4, 4, 4, 4]])}, "labels are neither"),
    ],
)
def test_what_cannot_be_attributed_is_refused_by_name(error, masks, given, words):
    with pytest.raises(error, match=words):
        read(*masks, **given)


def test_masks_of_heads_and_of_losses_hide_no_token():
    assert read(None, head_mask=LEFT[None]).is_whole
