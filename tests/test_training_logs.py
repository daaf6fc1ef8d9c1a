"""Training logs of other code bases become runs without weights: what is read, what is left out, and nothing by halves."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock

from workbench.checkpoints.training_logs.reading import log_readers, read_log, reader_of
from workbench.claims import CLAIMS
from workbench.claims.collect_evidence import collect, find_runs
from workbench.errors import BadCheckpoint, BadData, WorkbenchError
from workbench.runs import log_import
from workbench.runs.catalogue import catalogue
from workbench.runs.log_import import import_logs, is_log
from workbench.runs.run import list_runs

SHARED = Path(__file__).parents[2] / "shared" / "strangers" / "published" / "modded_nanogpt_val_loss.parquet"


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def curves(path):
    """{run: {quantity: {step: value}}} of a file, and the collected numbers."""
    numbers = read_log([path], reader_of(path))
    runs = [
        {name: dict(zip(s.tolist(), v.tolist(), strict=True)) for name, (s, v) in c.items()}
        for _, c in numbers.courses()
    ]
    return runs, numbers


def one(path):
    (run,), _ = curves(path)
    return run


def test_nanogpt_keeps_the_loss_of_the_batch_apart_from_its_estimate(tmp_path):
    log = written(
        tmp_path / "out.txt",
        "tokens per iteration will be: 491,520\nnumber of parameters: 10.65M\nstep 250: train loss 1.5482, val loss 1.7322\n"
        "saving checkpoint to out\niter 250: loss 1.6170, time 6002.98ms, mfu 9.86%\niter 260: loss nan, time 1396.29ms, mfu 9.94%\n",
    )
    run = one(log)
    assert run["validation_loss"] == {250: 1.7322}
    assert run["estimated_train_loss"] == {250: 1.5482}
    assert run["train_loss"][250] == 1.617
    assert math.isnan(run["train_loss"][260]), "a loss that broke is not hidden"
    assert run["seconds_per_step"] == pytest.approx({250: 6.00298, 260: 1.39629})


def test_modded_nanogpt_has_seconds_per_step_from_its_clock_and_not_its_running_average(tmp_path):
    lines = [
        'print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f}")', "step:0/3200 val_loss:10.8258 train_time:305ms step_avg:nanms",
        "step:125/3200 val_loss:4.6012 train_time:23000ms step_avg:200.00ms",
        "step:250/3200 val_loss:4.1012 train_time:41750ms step_avg:173.96ms",
    ]  # fmt: skip
    run, numbers = curves(written(tmp_path / "a.txt", "\r\n".join(lines)))
    assert run[0]["validation_loss"] == {0: 10.8258, 125: 4.6012, 250: 4.1012}
    assert run[0]["seconds_per_step"] == {250: pytest.approx(0.15)}, "the clock was set back before step 125"
    assert not numbers.skipped


def test_llm_c_counts_a_loss_without_step_from_the_line_before(tmp_path):
    line = "step {:4d}/10 | loss 11.032358 (+nanz)| norm 22.1414 (+nanz)| lr 8.57e-07 | 2575.63 ms | 39.0% bf16 MFU | 203557 tok/s"
    run, numbers = curves(
        written(tmp_path / "a.log", f"val loss 11.033154\n{line.format(1)}\n{line.format(2)}\nval loss 10.5\n")
    )
    assert run[0]["validation_loss"] == {0: 11.033154, 2: 10.5}
    assert run[0]["total_gradient_norm"][1] == 22.1414
    assert run[0]["learning_rate"][2] == 8.57e-07
    assert run[0]["seconds_per_step"][1] == pytest.approx(2.57563)
    assert "tokens_per_second" not in run[0]
    assert any("average" in why for why in numbers.skipped)
    main = one(
        written(tmp_path / "main.log", "s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:250 eval:0.2500\n")
    )
    assert main["validation_loss"] == {0: 11.0092}
    assert main["train_loss"] == {0: 11.0091}


def test_parameter_golf_keeps_the_loss_of_a_step_and_not_that_of_the_rounded_weights(tmp_path):
    text = (
        "warmup_step:20/20\nstep:1/20000 train_loss:6.9334 train_time:719ms step_avg:719.43ms\nswa:start step:50\n"
        "step:178/20000 val_loss:5.0593 val_bpb:2.9964 train_time:120672ms step_avg:677.93ms\n"
        "final_int8_zlib_roundtrip val_loss:5.3358 val_bpb:3.1601 eval_time:15338ms\n"
    )
    run = one(written(tmp_path / "train.log", text))
    assert run["validation_loss"] == {178: 5.0593}
    assert run["validation_bits_per_byte"] == {178: 2.9964}
    assert run["train_loss"] == {1: 6.9334}


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("step 100 | train: loss 3.0 | val: loss 3.2", "names an evaluation"), ("[eval] step=100, loss=3.2", "names an evaluation"),
        ("step 100 val ppl 20.1 loss 3.0", "names an evaluation"), ("step 100 loss 3.0 loss 3.1", "two values"),
        ("step 100 loss 3.0 step 110 loss 2.9", "two steps"), ("step 10k loss 3.0", "rounded"), ("step 1 000 loss 3.0", "no number"),
        ("step 100 loss 3.0 bits", "unit bits"), ("step 100 loss -3.0", "no cross-entropy"), ("[rank1] step 100 loss 3.1", "another rank"),
        ("step 100 loss 3,25", "no known quantity"),
    ],
)  # fmt: skip
def test_a_line_with_two_meanings_is_left_out_with_the_reason(tmp_path, line, left_out):
    run, numbers = curves(written(tmp_path / "a.log", f"step 90 loss 4.0\n{line}\n"))
    assert run == [{"train_loss": {90: 4.0}}]
    assert [why for why in numbers.skipped if left_out in why], numbers.skipped


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("step 100 loss 3,245", "loss has a comma"),
        ("step 1.000 loss 3.2", "the step is no number"),
        ("step 100 loss 1.2 (bpb)", "loss has the unit bpb"),
        ("step 100 loss 1.2 bits/byte", "loss has the unit bits/byte"),
        ("step 100 loss 1.2 bit per char", "loss has the unit bit per char"),
        ("step 100 lr 3.0 e-4", "lr has the unit e-4"),
        ("step 100 lr 3.0 x 10^-4", "lr has the unit x 10^-4"),
        ("step 100 [avg] loss 3.1", "the loss is a running mean"),
    ],
)
def test_a_number_with_another_unit_or_power_of_ten_is_left_out(tmp_path, line, left_out):
    (run,), numbers = curves(written(tmp_path / "out.log", f"step 0 loss 9.0 lr 0.1\n{line}\n"))
    assert run == {"train_loss": {0: 9.0}, "learning_rate": {0: 0.1}}
    assert any(reason.startswith(left_out) for reason in numbers.skipped)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,loss\n1,000,3.5\n2,000,3.4\n", "more cells than the header"),
        ("step,loss,\n1,3.5,\n2,3,4\n", None),
        ("step,train_loss,val_loss\n1,3.0,3.1\nstep,val_loss,train_loss\n2,2.8,2.7\n", "second header"),
        ("step\tloss\n1.000\t3.5\n2.000\t3.4\n", "two ways"),
    ],
)
def test_a_table_whose_cells_do_not_fit_its_header_is_refused(tmp_path, text, words):
    path = written(tmp_path / ("a.tsv" if "\t" in text else "a.csv"), text)
    if words is None:
        assert one(path)["train_loss"] == {1: 3.5, 2: 3.0}, "as many cells as names"
    else:
        with pytest.raises(BadData, match=words):
            curves(path)


def test_the_least_loss_is_no_time_and_a_time_needs_its_unit(tmp_path):
    path = written(tmp_path / "a.csv", "step,loss,val_loss_min,loss_s,step_time,step_time_ms\n1,3.0,3.1,2,300,300\n")
    assert one(path) == {"train_loss": {1: 3.0}, "seconds_per_step": {1: 0.3}}


@pytest.mark.parametrize("flag", [{"type": "eval"}, {"event": "validation"}, {"is_val": True}])
def test_a_row_that_names_an_evaluation_has_no_training_loss(tmp_path, flag):
    rows = [{"step": step, "loss": 5 - step} for step in range(4)] + [{"step": 2, "loss": 4.0} | flag]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert one(path) == {"train_loss": {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}, "validation_loss": {2: 4.0}}


def test_steps_and_losses_are_read_through_colours_quotes_and_separators(tmp_path):
    text = (
        "\x1b[32mstep 1_000\x1b[0m: loss \x1b[31m3.0\x1b[0m\r10%| | step 1,010/5,000 loss=2.9\r{'loss': 2.8, 'step': 1020}\n"
        "iter 4080 micro step 3 step 1030: loss 2.7\nstep 1040 loss 2."
    )
    run, numbers = curves(written(tmp_path / "a.log", text))
    assert run[0] == {"train_loss": {1000: 3.0, 1010: 2.9, 1020: 2.8, 1030: 2.7}}, "an optimiser step is no micro-batch"
    assert any("cut off" in why for why in numbers.skipped)


def test_a_loss_alone_on_a_line_has_a_step_only_beside_steps_of_llm_c(tmp_path):
    runs, numbers = curves(written(tmp_path / "a.log", "step 500 loss 3.0\nval loss 3.25\n"))
    assert runs == [{"train_loss": {500: 3.0}}]
    assert numbers.skipped == {"val loss has no step": 1}


def test_the_loss_of_a_file_that_is_named_after_an_evaluation_is_no_training_loss(tmp_path):
    for name in ("val.csv", "eval/log.csv", "run_valid.txt"):
        runs, numbers = curves(written(tmp_path / name, "step,loss\n1,3.0\n2,2.0\n"))
        assert not runs or not runs[0], name
        assert any("named after an evaluation" in why for why in numbers.skipped)
    rows = [
        {"step": s, "split": split, "loss": s + (split == "val")} for s in (1, 2) for split in ("train", "val", "test")
    ]
    pd.DataFrame(rows).to_json(tmp_path / "a.log", orient="records", lines=True)
    assert one(tmp_path / "a.log") == {"train_loss": {1: 1, 2: 2}, "validation_loss": {1: 2, 2: 3}}, (
        "JSON lines by content"
    )


def test_several_values_at_each_step_are_no_curve(tmp_path):
    repeated = one(written(tmp_path / "a.csv", "step,loss\n1,3\n1,3\n2,2\n2,2\n"))
    assert repeated == {"train_loss": {1: 3.0, 2: 2.0}}, "a line written twice"
    runs, numbers = curves(written(tmp_path / "b.csv", "step,name,loss\n1,a,3\n1,b,4\n2,a,2\n2,b,3\n"))
    assert runs == [{}]
    assert numbers.skipped == {"train_loss has several values at most of its steps": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step,loss,loss\n1,3,4\n", {"train_loss": {1: 3.0}}), ('step,loss\n"1,000",3\n', {"train_loss": {1000: 3.0}}),
        ("step,loss\n1,3.25\n2,3.", {"train_loss": {1: 3.25}}),
        ("step,loss,train_loss,train_runtime\n1,3,,\n2,,2.7,99\n", {"train_loss": {1: 3.0}}),
        ('"Step","Group: a - val/loss","b - val/loss"\n"1","3","4"\n', {"validation_loss": {1: 4.0}}),
    ],
)  # fmt: skip
def test_a_table_has_one_column_for_a_quantity(tmp_path, text, expected):
    for name, data in {"a.csv": text, "wide.csv": text.encode("utf-16")}.items():
        assert one(written(tmp_path / name, data)) == expected
    with pytest.raises(BadData, match="decimal commas"):
        one(written(tmp_path / "de.csv", "step;loss\n1.000;3,25\n"))


def test_links_are_followed_once_and_a_training_is_imported_once(tmp_path):
    text = "".join(f"step {s} loss {5 - s / 10:.4f}\n" for s in range(6))
    written(tmp_path / "other" / "b.log", text.replace("5.0", "5.1").replace("4.", "3."))
    written(tmp_path / "logs" / "x" / "a.log", text)
    written(tmp_path / "logs" / "x" / "a.csv", "step,loss\n" + "".join(f"{s},{5 - s / 10:.6f}\n" for s in range(6)))
    (tmp_path / "logs" / "y").symlink_to(tmp_path / "other", target_is_directory=True)
    (tmp_path / "logs" / "loop").symlink_to(tmp_path / "logs", target_is_directory=True)
    (tmp_path / "logs" / "again.log").symlink_to(tmp_path / "other" / "b.log")
    result = import_logs([tmp_path / "logs"], tmp_path / "runs", name="n")
    assert sorted((run.name, run.info["log"]["setting"]) for run in result.runs) == [("n-n-s0", ""), ("n-x-s0", "x")]
    assert any("with the losses of another log of their setting: a.log" in note for note in result.notes), result.notes


def test_a_line_is_read_by_whole_names(tmp_path):
    text = "INFO trainer step 1,000/5,000 | aux loss 0.1 | loss: 3.5 | lr 1e-4\nstep 1010 best val loss 3.1\nepoch 3: loss 2.0\n"
    run, numbers = curves(written(tmp_path / "a.log", text))
    assert run[0] == {"train_loss": {1000: 3.5}, "learning_rate": {1000: 1e-4}}
    assert numbers.skipped["aux_loss is no known quantity"] == 1
    smoothed, numbers = curves(
        written(tmp_path / "b.log", "step 00010/21400 (0.05%) | loss: 10.77 | lrm: 1.00 | dt: 500.5ms |\n")
    )
    assert smoothed == [{"seconds_per_step": {10: pytest.approx(0.5005)}}]


def test_lines_that_are_too_long_are_not_cut_inside_a_number(tmp_path):
    text = "step 1 loss 2.5\n" + "step 2 " + "x" * 3988 + " loss 3.14159\nstep 3 loss 1.5\n"
    run, numbers = curves(written(tmp_path / "a.log", text))
    assert run[0]["train_loss"] == {1: 2.5, 3: 1.5}
    assert any("longer" in why for why in numbers.skipped)


def test_the_mean_at_the_end_of_trainer_state_is_no_loss_of_the_last_step(tmp_path):
    history = [
        {"epoch": 0.5, "loss": 3.0, "grad_norm": 1.5, "learning_rate": 1e-4, "step": 10},
        {"eval_loss": 2.8, "eval_runtime": 3.0, "step": 10}, {"loss": 2.0, "step": 20},
        {"train_loss": 2.5, "train_runtime": 100.0, "total_flos": 1e18, "step": 20},
    ]  # fmt: skip
    run = one(written(tmp_path / "trainer_state.json", json.dumps({"log_history": history})))
    assert run["train_loss"] == {10: 3.0, 20: 2.0}
    assert run["validation_loss"] == {10: 2.8}
    with pytest.raises(BadData, match="log_history"):
        one(written(tmp_path / "other" / "trainer_state.json", "{}"))


def test_tables_of_lightning_and_wandb_have_holes_and_a_column_for_each_run(tmp_path):
    run = one(
        written(
            tmp_path / "metrics.csv",
            "epoch,step,train_loss_step,train_loss_epoch,val_loss\n0,9,3.5,,\n0,9,,3.9,3.2\n1,19,3.1,,\n",
        )
    )
    assert run == {"train_loss": {9: 3.5, 19: 3.1}, "validation_loss": {9: 3.2}}
    chart = '"Step","base - val/loss","base - val/loss__MIN","base - val/loss__MAX","vr - val/loss"\n10,3.5,3.5,3.5,3.4\n20,3.2,3.2,3.2,\n'
    numbers = read_log([written(tmp_path / "chart.csv", chart)], reader_of(tmp_path / "chart.csv"))
    assert {run: c["validation_loss"][1].tolist() for (_, run), c in numbers.courses()} == {
        "base": [3.5, 3.2],
        "vr": [3.4],
    }
    assert any("counts calls of `log`" in note for note in numbers.notes), "as an exported chart names it"
    history, numbers = curves(written(tmp_path / "h.csv", "_step,train/global_step,train/loss\n0,100,3.0\n1,200,2.9\n"))
    assert history[0]["train_loss"] == {100: 3.0, 200: 2.9}, "W&B's own count is no optimiser step"
    scalar = one(written(tmp_path / "run-a-tag-val_loss.csv", "Wall time,Step,Value\n1.5,7,3.25\n"))
    assert scalar == {"validation_loss": {7: 3.25}}
    lines = one(written(tmp_path / "log.jsonl", '{"lr": 0.1}\n{"step": 5, "val_loss": 3.0, "note": "x"}\n'))
    assert lines == {"validation_loss": {5: 3.0}}


def test_a_restart_replaces_what_it_repeats_and_a_second_start_is_another_run(tmp_path):
    line = "step {} loss {}\n"
    text = "".join(line.format(s, 9 - s / 10) for s in (0, 10, 20, 30)) + "".join(line.format(s, 1.0) for s in (15, 25))
    run, numbers = curves(written(tmp_path / "a.log", text))
    assert run[0]["train_loss"] == {0: 9.0, 10: 8.0, 15: 1.0, 25: 1.0}
    assert numbers.skipped["the run went back to step 15 and repeated it"] == 2
    runs, numbers = curves(written(tmp_path / "b.log", text + line.format(0, 5.0) + line.format(10, 4.0)))
    assert [list(r["train_loss"].values()) for r in runs] == [[9.0, 8.0, 1.0, 1.0], [5.0, 4.0]]
    assert any("2 runs" in note for note in numbers.notes)
    unsorted = one(written(tmp_path / "c.csv", "step,loss\n30,1\n10,3\n20,2\n"))
    assert unsorted["train_loss"] == {10: 3.0, 20: 2.0, 30: 1.0}


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.log", "Epoch 1 step 10: loss 3\nEpoch 2 step 0: loss 2\n"), ("a.csv", "epoch,step,loss\n1,10,3\n2,0,2\n")],
)
def test_steps_that_begin_again_in_each_epoch_are_refused(tmp_path, name, text):
    with pytest.raises(BadData, match="begin again in epoch 2"):
        one(written(tmp_path / name, text))


def test_fractional_steps_are_refused_and_not_cut(tmp_path):
    with pytest.raises(BadData, match=r"step 0\.5 is no whole number"):
        one(written(tmp_path / "a.csv", "step,loss\n0,3\n0.5,2\n"))
    with pytest.raises(BadData, match=r"step 1\.5 is no whole number"):
        one(written(tmp_path / "a.log", "step 1.5: loss 3.0\n"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "a,b\n1,2\n", "no column of steps"), ("a.csv", b"step,loss\n1,\"" + b"x" * 200_000, "cannot be read as table"),
        ("a.parquet", "PAR1 no table", "cannot be read"), ("trainer_state.json", '{"log_history": [1]}', "cannot be read"),
        ("trainer_state.json", "{", "cannot be read"), ("a.log", "nothing of interest\n", "no training log"),
        ("a.jsonl", "{no\n", "the line is no JSON"), ("a.log", "step 5 of the plan\n", "no training log"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_error_of_ours_and_leaves_nothing(tmp_path, name, content, words):
    written(tmp_path / "logs" / "good" / "b.log", "step 1 loss 2.0\n")
    bad = written(tmp_path / "logs" / "bad" / name, content)
    with pytest.raises(WorkbenchError, match=words):
        import_logs([bad], tmp_path / "runs", name="x")
    assert not list((tmp_path / "runs").glob("*")), "nothing is half imported"


def test_a_folder_is_a_setting_and_a_file_is_a_seed(tmp_path):
    for name in ("nanogpt/x/1.log", "nanogpt/x/2.log", "b/x/1.log", "b-x/1.log"):
        written(tmp_path / "logs" / name, f"step 0 val loss 3.0\nstep 10 val loss {len(name)}.5\n")
    written(tmp_path / "logs" / "b" / "notes.md", "no log")
    result = import_logs([tmp_path / "logs"], tmp_path / "runs", name="mine")
    facts = {(r.name, r.architecture, r.seed) for r in result.runs}
    assert facts == {
        ("mine-nanogpt-x-s0", "nanogpt/x", 0), ("mine-nanogpt-x-s1", "nanogpt/x", 1),
        ("mine-b-x-s0", "b/x", 0), ("mine-b-x-2-s0", "b-x", 0),
    }  # fmt: skip
    assert any("notes.md" in note for note in result.notes)
    entries = catalogue(tmp_path / "runs").entries
    assert {e.group for e in entries} == {"log-mine"}
    assert {e.series for e in entries} == {"nanogpt/x", "b-x", "b/x"}
    assert all(e.finished and e.last == 10 and not e.steps for e in entries)
    assert [r.progress for r in list_runs(tmp_path / "runs")[0]] == ["10 logged"] * 4
    with pytest.raises(WorkbenchError, match="exists; choose another name"):
        import_logs([tmp_path / "logs"], tmp_path / "runs", name="mine")


def test_many_logs_have_one_note_for_their_form(tmp_path, monkeypatch):
    monkeypatch.setattr(log_import, "TOLD", 3)
    for i in range(5):
        written(tmp_path / "logs" / f"{i}.log", f"step 1 loss 2.{i}\nstep 2 loss nan\nstep 3k loss 1\n")
    notes = import_logs([tmp_path / "logs"], tmp_path / "runs", name="m").notes
    assert notes[-2:] == ("5 logs (text): 5 runs, 10 train loss", "5 logs (text): left out: the step is rounded (5)")
    assert notes[3] == "and 2 more notes of this kind"


def test_two_spellings_of_a_name_are_two_quantities(tmp_path):
    rows = "".join(f"{step},{3 - step / 100},\n{step + 5},,4\n" for step in (0, 10))
    assert one(written(tmp_path / "a.csv", "step,train/loss,train_loss\n" + rows)) == {"train_loss": {0: 3.0, 10: 2.9}}


def test_a_split_before_a_dash_is_no_run(tmp_path):
    run = one(written(tmp_path / "a.csv", "step,train - loss,Val - loss\n1,3,4\n2,2,3\n"))
    assert run == {"train_loss": {1: 3.0, 2: 2.0}, "validation_loss": {1: 4.0, 2: 3.0}}


@pytest.mark.parametrize("word", ["test", "dev"])
def test_a_loss_of_a_test_set_is_no_training_loss(tmp_path, word):
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 9.0, "type": word}]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert one(path) == {"train_loss": {1: 3.0}}
    runs, numbers = curves(written(tmp_path / f"{word}.csv", "step,loss\n1,3\n2,2\n"))
    assert not runs
    assert any("name it train_loss or val_loss" in why for why in numbers.skipped)


def test_losses_in_bits_and_sums_are_left_out(tmp_path):
    for base, read in ((2, []), (math.e, [{"validation_loss": {10: 3.9, 20: 3.8}}])):
        rows = [f"step {step} val_loss {4 - step / 100} val_ppl {base ** (4 - step / 100):.3f}\n" for step in (10, 20)]
        runs, numbers = curves(written(tmp_path / "a.log", "".join(rows)))
        assert [run for run in runs if run] == read
        assert any("is in bits" in why for why in numbers.skipped) == (base == 2)
    runs, numbers = curves(written(tmp_path / "a.csv", "step,loss,val_loss\n1,4096,3\n2,3276,2.9\n"))
    assert runs == [{"validation_loss": {1: 3.0, 2: 2.9}}]
    assert any("train_loss is above 15 nats" in why for why in numbers.skipped)


def test_tokens_and_micro_batches_are_no_steps(tmp_path):
    rows = "".join(f"{524_288 * i},{3 - i / 10}\n" for i in range(4))
    with pytest.raises(BadData, match="multiples of 524,288, so they may count tokens"):
        curves(written(tmp_path / "a.csv", "step,loss\n" + rows))
    assert one(written(tmp_path / "b.csv", "step,loss\n10000,3\n20000,2\n30000,1\n"))["train_loss"][30000] == 1.0
    with pytest.raises(BadData, match="iter counts micro-batches"):
        curves(written(tmp_path / "c.csv", "iter,micro_step,loss\n0,0,3\n1,1,2\n"))
    runs, numbers = curves(written(tmp_path / "c.log", "iter 0 micro_step 0 loss 3\niter 1 micro_step 1 loss 2\n"))
    assert (runs, numbers.skipped) == ([], {"iter counts micro-batches; add the step": 2})
    rows = [{"_step": i, "train_step": 10 * i, "train/loss": 3.0} for i in range(3)]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert one(path) == {"train_loss": {0: 3.0, 10: 3.0, 20: 3.0}}, "`_step` counts calls of `log`"


def test_files_with_one_name_are_named_by_their_folders(tmp_path):
    for version in (0, 1):
        written(tmp_path / "lr1" / f"version_{version}" / "metrics.csv", "epoch,step,val_loss\n0,9,3.2\n")
    written(tmp_path / "lr2" / "version_0" / "metrics.csv", "epoch,step,val_loss\n0,9,3.2\n")
    result = import_logs([tmp_path / "lr1", tmp_path / "lr2"], tmp_path / "runs", name="l")
    assert [(r.architecture, r.seed) for r in result.runs] == [("lr1", 0), ("lr1", 1), ("lr2", 0)]


def test_states_of_one_training_are_one_run(tmp_path):
    for step in (10, 20):
        history = [{"loss": 3.0, "step": s} for s in range(10, step + 1, 10)]
        written(tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json", json.dumps({"log_history": history}))
    (run,) = import_logs([tmp_path / "out"], tmp_path / "runs", name="hf").runs
    assert run.telemetry()["step"].tolist() == [10, 20]


def test_a_failed_import_removes_only_its_own_files(tmp_path, monkeypatch):
    log, runs = written(tmp_path / "x" / "a.log", "step 1 loss 2.0\n"), tmp_path / "runs"
    written(tmp_path / "y" / "a.log", "step 1 loss 2.0\n")
    other = runs / "n-y-s0"

    def race(folder, *args, _write=log_import._write_telemetry, **more):
        written(other / "run.json", "{}")  # another process takes the second name meanwhile
        _write(folder, *args, **more)

    monkeypatch.setattr(log_import, "_write_telemetry", race)
    with pytest.raises(WorkbenchError, match="exists"):
        import_logs([log.parent, tmp_path / "y"], runs, name="n")
    assert [path.name for path in runs.iterdir()] == ["n-y-s0"]
    assert (other / "run.json").read_text() == "{}"


def test_what_a_killed_import_left_is_removed_by_the_next(tmp_path):
    log, runs = written(tmp_path / "a.log", "step 1 loss 2.0\n"), tmp_path / "runs"
    left, at_work, _ = (written(runs / f".{name}.part" / log_import.LOCK, "") for name in ("left", "at-work", "new"))
    for lock in (left, at_work):
        os.utime(lock, (0, 0))
    with FileLock(at_work):
        import_logs([log], runs, name="a")
    assert sorted(path.name for path in runs.iterdir()) == [".at-work.part", ".new.part", "a"]


def test_what_needs_weights_says_that_there_are_none(tmp_path):
    (run,) = import_logs([written(tmp_path / "a.log", "step 1 loss 2.0\n")], tmp_path / "runs", name="a").runs
    for needed in (
        lambda: run.load(),
        lambda: run.model,
        lambda: run.train,
        lambda: run.resolve("last"),
        lambda: run.tokenizer,
    ):
        with pytest.raises(BadCheckpoint, match="training log: it has no weights"):
            needed()
    assert is_log(tmp_path / "a.log")
    assert not is_log(run.path)
    assert not is_log(written(tmp_path / "w" / "model.safetensors", "x").parent), "weights are imported as such"


def test_a_claim_on_the_loss_is_not_tested_where_a_log_leaves_its_conditions_unknown(tmp_path):
    step = np.arange(0, 1001, 100)
    for label, shift in (("transformer", 0.0), ("resformer", -0.1)):
        for seed in range(3):
            losses = 3 + shift + seed / 1000 + (step < 900)
            table = pd.DataFrame({"step": step, "val_loss": losses})
            table.to_csv(written(tmp_path / "logs" / label / f"{seed}.csv", ""), index=False)
    import_logs([tmp_path / "logs"], tmp_path / "runs", name="l")
    claim = CLAIMS["lower_loss"]
    evidence, problems = collect(find_runs([tmp_path / "runs"])[0], [claim])
    assert not problems
    budget = {"tokens": 1e6, "parameters": 1e4}
    for known, status, words in (
        ({}, "gated", "unknown training tokens per parameter and warm-up steps"),
        (budget, "gated", "unknown warm-up steps"),
        (budget | {"warmup": 200.0}, "unresolved", "unresolved"),
    ):
        verdict = claim.judge(evidence.of_runs(evidence.runs.assign(**known)))
        assert (verdict.status, words in verdict.words) == (status, True), verdict
        assert "-0.1 " in verdict.sentence
        assert "learning rates unknown" in verdict.sentence


@pytest.mark.slow
def test_every_claim_has_a_verdict_on_logs_and_decides_none_that_needs_more(tmp_path):
    from workbench.claims.judging import judge

    step = np.arange(0, 101, 50)
    models = [
        "transformer",
        "resformer",
        "neutreno",
        "denseformer",
        "values_scaled",
        "svformer",
        "resformer_learnable",
        "query_residual",
    ]
    rows = [
        pd.DataFrame({"model": m, "run": i, "step": step, "val_loss": 3 + j / 9 + i / 99})
        for j, m in enumerate(models)
        for i in range(3)
    ]
    pd.concat(rows).to_csv(tmp_path / "t.csv", index=False)
    import_logs([tmp_path / "t.csv"], tmp_path / "runs", name="t")
    evidence, _ = collect(find_runs([tmp_path / "runs"])[0], list(CLAIMS.values()))
    verdicts = {j.claim.name: j.verdict.status for j in judge(evidence, list(CLAIMS.values()))}
    assert set(verdicts.values()) <= {"gated", "not_checkable"}
    assert verdicts["ahead_of_relatives"] == "gated"


def test_readers_recognise_files_by_name_or_content(tmp_path):
    assert {r.name for r in log_readers()} == {
        "text",
        "table",
        "metrics.csv",
        "trainer_state.json",
        "TensorBoard events",
        "MLflow",
        "W&B",
    }
    assert reader_of(written(tmp_path / "a.bin", b"\0\1\2")) is None
    assert reader_of(tmp_path) is None
    wide = written(tmp_path / "p.log", "step 1 loss 2.5\r\n".encode("utf-16"))
    assert one(wide)["train_loss"] == {1: 2.5}, "what PowerShell writes"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", "training", "depth", "prompt"])
def test_every_page_opens_on_logs_alone(tmp_path, browse, name):
    import_logs([written(tmp_path / "a.log", "step 1 loss 2.0\nstep 2 loss 1.5\n")], tmp_path / "runs", name="a")
    at = browse(tmp_path / "runs", name)
    assert not at.exception
    if name not in ("start", "training"):
        assert any("training log has no checkpoints" in info.value for info in at.info)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/strangers")
@pytest.mark.slow
def test_the_published_ablation_of_value_residuals_is_one_command(tmp_path):
    arms = {"4a71cc92": "transformer", "042f9e87": "resformer", "43f60c4f": "resformer_learnable"}
    result = import_logs([SHARED], tmp_path, name="shortcuts", architecture=arms)
    tables = {
        r.architecture: r.telemetry().pivot_table(index="step", columns="metric", values="value") for r in result.runs
    }
    base, fixed, learned = (tables[name] for name in ("transformer", "resformer", "resformer_learnable"))
    change = fixed["validation_loss"] - base["validation_loss"]
    assert change.loc[[125, 250, 500, 1000, 2000, 3200]].round(3).tolist() == [
        -0.072,
        -0.073,
        -0.036,
        -0.026,
        -0.020,
        -0.012,
    ]
    assert (learned["validation_loss"] - base["validation_loss"]).iloc[-1] == pytest.approx(-0.021, abs=5e-4)
    assert fixed["seconds_per_step"].mean() / base["seconds_per_step"].mean() == pytest.approx(1.021, abs=5e-4)
