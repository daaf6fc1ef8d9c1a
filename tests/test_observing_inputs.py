"""What researchers give `observe`: text, tokenizers of other libraries, and what these return; read, or refused with what to do."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BatchEncoding, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import workbench
from workbench.errors import BadData, WorkbenchError
from workbench.measurement.models_and_data import Subject, sample_of
from workbench.prompts.prompt import tokenise
from workbench.runs.checkpoint_import import import_run

TEXT = "The cat sat on the mat and looked at the moon."


def byte_level(*, bos=True):
    """A tokenizer as the Hub has thousands: byte-level, with a start token or without, truncating and padding."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"] if bos else ["</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    t.train_from_iterator([TEXT], trainer)
    if bos:
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    t.enable_truncation(5)
    t.enable_padding(length=40)
    return PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>" if bos else None, eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def see(module, example, **how):
    return workbench.observe(module, example, quiet=True, **how)


@pytest.mark.parametrize("bos", [True, False])
def test_a_tokenizer_of_transformers_is_used_in_full_and_left_as_it_was(llama, bos):
    given = byte_level(bos=bos)
    before = given(TEXT).input_ids
    observed = see(llama, TEXT, tokenizer=given)
    ids = observed.to_tokens(TEXT)
    assert ids.tolist() == [before]  # with the start token, where its template puts one
    bare = observed.to_tokens(TEXT, prepend_bos=False)
    assert observed.tokenizer.decode(bare[0]) == TEXT
    assert bare.shape[1] == len(before) - bos
    assert observed.to_str_tokens("The cat sat")[1 + bos].startswith("·")
    assert observed.tokenizer.vocab_size == len(given)
    assert observed.tokenizer.eos_id == given.eos_token_id
    with torch.no_grad():
        assert torch.equal(observed(TEXT), llama(ids).logits)
    if bos:
        assert torch.equal(observed.to_tokens(TEXT, prepend_bos=True), ids)
    else:
        with pytest.raises(BadData, match="names no token that begins a document"):
            observed.to_tokens(TEXT, prepend_bos=True)
    with pytest.raises(BadData, match="half a character"):
        observed("a\ud800b")
    assert given(TEXT).input_ids == before
    observed.tokenizer = given.backend_tokenizer
    assert torch.equal(observed.to_tokens(TEXT), ids)


class Callable:
    def __call__(self, *texts, **how):
        return {"input_ids": [[1, 2, 3]]}


class Adding(PreTrainedTokenizerFast):
    """A tokenizer that changes the text in Python."""

    def _encode_plus(self, text, *more, **how):
        return super()._encode_plus(text.upper(), *more, **how)


def adding():
    return Adding(tokenizer_object=byte_level().backend_tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Callable, "tokenizer is a Callable, which is not read: give a fast tokenizer of transformers"),
        (adding, "a Adding, does more than its backend"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_in_full_is_refused_at_once(llama, make, cause):
    with pytest.raises(BadData, match=cause):
        see(llama, torch.arange(16)[None], tokenizer=make())


def test_a_tokenizer_of_another_model_is_refused(llama):
    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).eval()
    with pytest.raises(BadData, match=r"tokenizer has ids up to \d+, the model's vocabulary goes to 60"):
        see(small, torch.arange(16)[None], tokenizer=byte_level())


IDS = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)


@pytest.mark.parametrize("kind", [BatchEncoding, dict])
def test_what_a_tokenizer_returns_is_read_for_its_ids(llama, kind):
    observed = see(llama, kind({"input_ids": IDS, "attention_mask": MASK}))
    assert observed.config.n_layers == 2


def test_what_cannot_be_read_for_its_ids_is_refused_and_the_advice_works(llama):
    padded = {"input_ids": IDS, "attention_mask": MASK.clone()}
    padded["attention_mask"][:, :3] = 0
    with pytest.raises(BadData, match="6 of 32 positions of example_tokens are padding") as refused:
        see(llama, padded)
    advice = str(refused.value).split("example_tokens=")[1]
    assert see(llama, eval(advice, {"batch": padded})).config.n_layers == 2
    labelled = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(BadData, match=r"example_tokens has labels beside input_ids: .*call=lambda") as refused:
        see(llama, labelled)
    call = eval(str(refused.value).split("call=")[1], {"batch": labelled})
    assert see(llama, labelled["input_ids"], call=call).config.n_layers == 2
    with pytest.raises(BadData, match="example_tokens has pixels, no input_ids"):
        see(llama, {"pixels": IDS})
    with pytest.raises(BadData, match=r"is text, and there is no tokenizer: give observe\(\.\.\., tokenizer="):
        see(llama, TEXT)
    with pytest.raises(BadData, match=r"texts of \[\d+, \d+\] tokens: give one text"):
        see(llama, [TEXT, TEXT[:9]], tokenizer=byte_level())
    with pytest.raises(WorkbenchError, match="8 positions or more"):
        see(llama, "The cat", tokenizer=byte_level())


def test_models_that_differ_in_their_call_have_rows_of_their_own(llama):
    module, ids = llama, torch.arange(24).reshape(2, 12) % 50
    plain = see(module, ids)
    shifted = see(module, ids, call=lambda m, x: m((x + 1) % 50))
    records = workbench.measure([plain, shifted, plain], metrics="sink_mass", data=ids)
    assert len(set(records["run"])) == 2


@pytest.mark.parametrize("template", [False, True])
def test_a_text_begins_with_a_start_token_where_the_checkpoints_tokenizer_puts_one(llama, tmp_path, template):
    """As in transformers, where the template of `tokenizer.json` decides, and not `add_bos_token` of the settings."""
    tokenizer = byte_level()
    if not template:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": not template}))
    expected = AutoTokenizer.from_pretrained(tmp_path)("The cat sat").input_ids
    model = workbench.load(tmp_path)
    run = import_run(tmp_path, tmp_path / "runs", name="mine")
    assert (expected[0] == 0) == template
    for each in (model, run.load()):
        assert each.to_tokens("The cat sat").tolist() == [expected]
        assert tokenise(each, "The cat sat").ids.tolist() == [expected]
    assert sample_of("The cat sat", Subject(run), 1, None, 0).ids.tolist() == [expected]
