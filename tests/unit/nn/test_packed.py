"""Packs: texts one after another in a row do not see each other, whatever attention a model has."""

import itertools

import pytest
import torch
import transformers

from spark_dl.nn import causal_lm_loss, document_mask
from tests.builders.tensor_models import build_gpt2, build_llama, build_qwen3

LENGTHS = [3, 1, 4]
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 0, 0], [*range(10)]])  # the second is one text


@pytest.mark.parametrize("is_causal", [True, False])
def test_tokens_attend_to_their_own_text(is_causal):
    text = [0, 0, 0, 1, 2, 2, 2, 2, 3, 4]  # each place of the padding is a text of its own
    mask = document_mask(POSITIONS, is_causal=is_causal)
    assert mask.shape == (2, 1, 10, 10)
    assert mask.dtype == torch.bool
    for i, j in itertools.product(range(10), range(10)):
        is_before = j <= i or not is_causal
        assert mask[0, 0, i, j] == (text[i] == text[j] and is_before)
        assert mask[1, 0, i, j] == is_before
    assert document_mask(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 1, 3, 3)


def model_of(build):
    return next(module for module in build()[0].modules() if isinstance(module, transformers.PreTrainedModel)).eval()


@pytest.mark.parametrize("build", [build_gpt2, build_llama, build_qwen3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_pack_is_that_of_its_texts(build, attention):
    torch.manual_seed(0)
    model = model_of(build)
    model.set_attn_implementation(attention)
    ids = torch.randint(1, model.config.vocab_size, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 8:] = False
    labels = ids.where(POSITIONS > 0, -100)
    texts = [*ids[0, :8].split(LENGTHS), ids[1]]
    total = sum(model(input_ids=t[None], labels=t[None]).loss * (len(t) - 1) for t in texts if len(t) > 1)
    count = sum(len(text) - 1 for text in texts)
    batch = {"input_ids": ids.int(), "position_ids": POSITIONS.int(), "labels": labels.int(), "input_ids_mask": mask}
    torch.testing.assert_close(causal_lm_loss(model, batch), total / count)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(causal_lm_loss(model, batch).float(), total / count, rtol=0.02, atol=0)
    last = {**batch, "weight": torch.tensor([0.0, 1.0])}
    torch.testing.assert_close(causal_lm_loss(model, last), model(input_ids=ids[1:], labels=ids[1:]).loss)
    padded = {"input_ids": ids, "input_ids_mask": torch.ones(2, 10, dtype=torch.bool)}
    torch.testing.assert_close(causal_lm_loss(model, padded), model(input_ids=ids, labels=ids).loss)


def test_B27_an_attention_that_takes_no_mask_is_an_error():
    model = model_of(build_llama)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="found packs and the attention 'flash_attention_2', expected sdpa or eager"):
        causal_lm_loss(model, {"input_ids": torch.ones(2, 10), "position_ids": POSITIONS})
