"""The registry says everything about each architecture, without torch, and what two of them are together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import seams

from workbench.errors import UnknownName
from workbench.models import architecture_names_and_colours as registry
from workbench.models.architecture_names_and_colours import (
    ARCHITECTURES,
    SYMBOLS,
    architecture,
    architecture_colour,
    architecture_label,
    architecture_symbol,
    options_of,
)

FOLDER = Path(registry.__file__).parent / "architectures"


def test_every_entry_is_complete():
    for name, entry in ARCHITECTURES.items():
        assert re.fullmatch("#[0-9A-F]{6}", entry.colour), name
        assert entry.symbol in SYMBOLS, name
        assert entry.label, name
        for sentence in (entry.summary, entry.plain):
            assert sentence, name
            assert not sentence.endswith("."), f"{name}: it stands in tables and lists"
        for key in (*entry.constants, *(entry.neutral or {})):
            assert key in {k for shortcut in entry.shortcuts for k in options_of(shortcut)}, name
        assert entry.options.items() >= entry.constants.items(), name


def test_every_option_has_a_name_in_words_of_its_own():
    assert set(registry.OPTION_LABELS) == {key for entry in ARCHITECTURES.values() for key in entry.options}
    assert len(set(registry.OPTION_LABELS.values())) == len(registry.OPTION_LABELS)


@pytest.mark.parametrize("part", ["label", "colour", "summary", "plain"])
def test_no_two_architectures_share_a_name_a_colour_or_a_sentence(part):
    values = [getattr(entry, part) for entry in ARCHITECTURES.values()]
    assert len(set(values)) == len(values)


def test_the_folder_of_architectures_lists_what_is_registered():
    files = {name.partition(".")[0] for entry in ARCHITECTURES.values() for name in entry.classes}
    assert files == {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


def test_each_file_says_its_formula_source_seam_parameters_cache_and_degenerate_case():
    for file in {sys.modules[s.__module__] for entry in ARCHITECTURES.values() for s in entry.shortcuts}:
        said = str(file.__doc__)
        assert "=" in said.partition("Source:")[0], file
        heads = [line.partition(":")[0] for line in said.splitlines()]
        for head in ("Source", "Seam", "Parameters", "Cache", "Degenerate case"):
            assert heads.count(head) == 1, (file, head)


def test_those_that_stand_for_all_in_tests_use_every_seam_and_leave_no_newcomer_out(monkeypatch):
    used = [set().union(*map(seams.uses, names)) for names in (ARCHITECTURES, seams.COVERING)]
    assert used[0] == used[1] == set().union(*map(seams.uses, seams.TOGETHER))
    assert {"transformer", "denseformer", "residual_attention"} <= set(seams.COVERING)
    assert len(seams.COVERING) <= len(ARCHITECTURES) / 2
    monkeypatch.setitem(ARCHITECTURES, "newcomer", ARCHITECTURES["resformer"])
    assert seams.standing_for_all() == [*seams.COVERING, "newcomer"]


def test_no_registration_needs_torch():
    code = "import sys, workbench.models.architecture_names_and_colours as r; r.architecture('gqa+neutreno'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_combination_is_described_by_rule_unless_registered():
    ours, one, other = architecture("neutreno+share_q"), ARCHITECTURES["neutreno"], ARCHITECTURES["share_q"]
    assert ours.label == "NeuTRENO + shared queries"
    assert ours.options == one.options | other.options
    assert ours.neutral == {"neutreno_lambda": 0, "group": 1}
    assert ours.value_path
    assert ours.colour == architecture_colour("neutreno+share_q") != architecture_colour("share_q+neutreno")
    assert architecture_label("svformer+gqa") == "SVFormer + GQA4"
    assert architecture("gqa+svformer").constants == {"query_group": 4}, "as published together, in any order"
    assert architecture("cross_layer+gqa").neutral is None
    with pytest.raises(UnknownName, match="did you mean resformer"):
        architecture("gqa+resfomer")


def test_names_that_are_not_registered_have_looks_of_their_own():
    assert architecture_label("my model") == "my model"
    assert architecture_label("resformer lambda_v1=0.3") == "ResFormer lambda_v1=0.3"
    assert architecture_colour("my model") == architecture_colour("my model") != architecture_colour("my other model")
    assert architecture_symbol("my model") in SYMBOLS
