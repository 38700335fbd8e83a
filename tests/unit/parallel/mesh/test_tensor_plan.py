"""Tensor plans: defaults of several families, patterns, every error, stacks of layers, and the boxes of each rank."""

import itertools
import re

import pytest
import torch
from torch import nn

from spark_dl.parallel.mesh.tensor.functions import map_input
from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan
from spark_dl.parallel.mesh.tensor.sequence import find_stacks
from spark_dl.parallel.mesh.tensor.words import Cut, cuts, take
from tests.builders.tensor_models import MODELS, Encoder, build_own


def mlp(*sizes, activation=nn.ReLU):
    layers = [layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), activation())]
    return nn.Sequential(*layers[:-1])


class Net(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def test_pairs_of_linear_layers_of_a_sequential_are_cut_in_turn():
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8), nn.Linear(8, 2)]
    expected = {"0": "colwise", "3": "rowwise", "5": "colwise", "6": "rowwise"}
    assert resolve_tensor_plan(nn.Sequential(*layers), None, 2) == expected
    # What is between them must compute each feature by itself.
    for between in (nn.Softmax(-1), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.PReLU(8)):
        model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        assert resolve_tensor_plan(model, None, 2) == {"2": "colwise", "4": "rowwise"}


def test_transformer_layers_are_cut_by_heads_and_features():
    words = {"self_attn": "heads", "linear1": "colwise", "linear2": "rowwise"}
    expected = {f"layers.layers.{i}.{name}": word for i in range(2) for name, word in words.items()}
    assert resolve_tensor_plan(Encoder(), None, 4) == expected
    decoder = resolve_tensor_plan(nn.TransformerDecoderLayer(8, 2, 16), None, 2)
    assert decoder == {**words, "multihead_attn": "heads"}


@pytest.mark.parametrize(("name", "expected"), [
    ("bert", {"model.bert.embeddings.word_embeddings": "vocab",
              "model.bert.encoder.layer.1.attention.self.key": "colwise",
              "model.bert.encoder.layer.0.output.dense": "rowwise",
              "model.cls.predictions.decoder": "colwise_gather_output"}),
    ("gpt2", {"model.transformer.wte": "vocab", "model.transformer.h.1.attn.c_attn": "colwise_qkv",
              "model.transformer.h.0.mlp.c_proj": "rowwise", "model.lm_head": "colwise_gather_output"}),
    ("llama", {"model.model.layers.1.self_attn.q_proj": "colwise", "model.model.layers.0.mlp.down_proj": "rowwise",
               "model.model.embed_tokens": "vocab", "model.lm_head": "colwise_gather_output"}),
    ("qwen3", {"model.model.layers.0.self_attn.k_norm": "replicated_with_grad_allreduce"}),
])  # fmt: skip
def test_models_of_hugging_face_within_another_model(name, expected):
    if name in ("llama", "qwen3"):
        pytest.importorskip("transformers", "5.0", reason="older versions have other plans")
    plan = resolve_tensor_plan(MODELS[name]()[0], None, 2)
    assert expected.items() <= plan.items()


def test_patterns_match_one_part_of_a_name():
    model = Net(layers=nn.ModuleList([mlp(4, 8, 4), mlp(4, 8, 4)]), head=nn.Linear(4, 2))
    plan = {"layers.*.0": "colwise", "layers.?.2": "rowwise", "head": "replicate"}
    assert resolve_tensor_plan(model, plan, 2) == {
        "layers.0.0": "colwise", "layers.1.0": "colwise", "layers.0.2": "rowwise", "layers.1.2": "rowwise",
    }  # fmt: skip


def test_words_of_hugging_face_that_mean_the_same():
    model = Net(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Embedding(4, 4), d=nn.LayerNorm(4))
    plan = {"a": "colwise_rep", "b": "rowwise_rep", "c": "embedding_rowwise", "d": "sequence_parallel"}
    expected = {"a": "colwise_gather_output", "b": "rowwise_split_input", "c": "vocab", "d": "sequence"}
    assert resolve_tensor_plan(model, plan, 2) == expected


def tied(**plan):
    model = Net(embed=nn.Embedding(6, 4), head=nn.Linear(4, 6, bias=False), other=mlp(4, 8, 4))
    model.head.weight = model.embed.weight
    return model, plan


@pytest.mark.parametrize("plan", [{"embed": "vocab"}, {"head": "colwise_gather_output"}])
def test_a_layer_that_shares_a_cut_weight_is_cut_too(plan):
    expected = {"embed": "vocab", "head": "colwise_gather_output"}
    assert resolve_tensor_plan(*tied(**plan), 2) == expected


HEADS, PAIR = (
    {"layers.layers.*.self_attn": "heads"},
    {"layers.layers.*.linear1": "colwise", "layers.layers.*.linear2": "rowwise"},
)


def tied_biases():
    model = mlp(4, 8, 8)
    model[2].bias = model[0].bias
    return model


@pytest.mark.parametrize(("model", "plan", "expected"), [
    (Encoder(), {"layers.layer.*.linear1": "colwise"},
     "no module of the model has the name 'layers.layer.*.linear1'; did you mean 'layers.layers.*.linear1'"),
    (Encoder(), {"head": "colwis"}, "unknown word 'colwis' for 'head'; did you mean 'colwise'"),
    (Encoder(), {"head": "moe_tp_experts"}, "unknown word 'moe_tp_experts'"),
    (Encoder(), {}, "expected words by patterns of modules' names, found {}"),
    (Encoder(), {"hea*": "colwise", "*": "rowwise"},
     "expected one word for 'head', found 'colwise' by 'hea*' and 'rowwise' by '*'"),
    (Encoder(), {"embed": "colwise"}, "'colwise' expects a linear layer, found Embedding for 'embed'"),
    (Encoder(), {"layers.layers.*.self_attn": "colwise"}, "('heads' cuts a MultiheadAttention), found Mul"),
    (Encoder(), {"head": "vocab"}, "'vocab' expects an Embedding, found Linear for 'head'"),
    (Encoder(), {"head": "heads"}, "'heads' expects a torch.nn.MultiheadAttention, found Linear"),
    (Encoder(), {"head": "sequence"}, "'sequence' expects a norm, or a layer without parameters, found Linear"),
    (Net(a=nn.Embedding(9, 2, max_norm=1.0)), {"a": "vocab"}, "an embedding with max_norm=1.0 cannot be cut"),
    (Net(a=nn.MultiheadAttention(4, 2, add_bias_kv=True)), {"a": "heads"}, "cannot be cut by heads, found 'a'"),
    (Net(a=nn.Embedding(3, 2)), {"a": "vocab"}, "expected at least parallel.tensor=4 rows in 'a', found 3"),
    (Encoder(heads=2), None,
     "parallel.tensor=4 does not divide the 2 heads of 'layers.layers.0.self_attn'; for this plan "),
    (mlp(4, 6, 4), None, "does not divide the 6 outputs of '0'; for this plan parallel.tensor of 1, 2, 3, 6 works"),
    (mlp(4, 6, 4), {"2": "rowwise_split_input"}, "does not divide the 6 inputs of '2'"),
    (*build_own(), "does not divide the 2 heads of '1.attention.k'; for this plan parallel.tensor of 1, 2 works"),
    (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), None,
     "expected a plan for Sequential, found None: the model brings no plan"),
    (*tied(embed="vocab", head="colwise"),
     "must be cut in the same way, found 'vocab' for 'embed', 'colwise' for 'head'"),
    (tied_biases(), {"0": "colwise", "2": "rowwise"},
     "share a parameter must be cut in the same way, found 'colwise' for '0.bias', 'rowwise' for '2.bias'"),
    (mlp(4, 8, 8), {"0": "colwise"},
     "'colwise' for '0' leaves slices of its outputs on the ranks, and no layer after it takes them; expected "
     "'rowwise' for the next linear layer, or 'colwise_gather_output' for this one"),
    (Net(a=mlp(4, 8, 4), b=mlp(4, 8, 4)), {"a.0": "colwise", "a.2": "rowwise", "b.0": "colwise"},
     "'colwise' for 'b.0' leaves slices of its outputs"),
    (mlp(4, 8, 8), {"2": "rowwise"},
     "'rowwise' for '2' expects slices of its inputs, and no layer before it is cut by columns; expected 'colwise' for "
     "the linear layer before it, or 'rowwise_split_input' for this one"),
    (mlp(4, 8, 8), {"0": "colwise_gather_output", "2": "rowwise"}, "'rowwise' for '2' expects slices of its inputs"),
])  # fmt: skip
def test_B27_errors_of_a_plan_name_the_module_and_what_to_change(model, plan, expected):
    with pytest.raises(ValueError, match=f"^spec.tensor_plan: .*{re.escape(expected)}"):
        resolve_tensor_plan(model, plan, 4)


@pytest.mark.parametrize(("model", "plan"), [
    (mlp(4, 8, 8), {"0": "colwise", "2": "rowwise"}), (mlp(4, 8, 8), {"0": "colwise_gather_output"}),
    (mlp(4, 8, 8), {"2": "rowwise_split_input"}),
    (Net(down=nn.Linear(8, 4), up=nn.Linear(4, 8)), {"down": "rowwise", "up": "colwise"}),  # in the order of the names
    (Net(a=Net(up=nn.Linear(4, 8)), b=Net(down=nn.Linear(8, 4))), {"a.up": "colwise", "b.down": "rowwise"}),
])  # fmt: skip
def test_B27_a_plan_whose_slices_are_taken_is_no_error(model, plan):
    assert resolve_tensor_plan(model, plan, 2) == plan


def test_heads_of_hugging_face_s_models_must_divide():
    for name, size, heads in (("bert", 8, 4), ("gpt2", 8, 4), ("llama", 4, 2), ("neox", 8, 4)):
        with pytest.raises(ValueError, match=f"={size} does not divide the {heads} heads of 'model"):
            resolve_tensor_plan(MODELS[name]()[0], None, size)


def test_a_word_of_a_model_s_own_plan_that_is_not_supported():
    model = mlp(4, 8, 4)
    model._tp_plan = {"0": "mla_kv_a_proj"}
    with pytest.raises(
        ValueError, match="the model's own plan has the word 'mla_kv_a_proj' for '0', which is not supp"
    ):
        resolve_tensor_plan(model, None, 2)


def test_stacks_are_the_layers_that_are_cut_whole():
    (stack,) = find_stacks(Encoder(batch_first=False), resolve_tensor_plan(Encoder(), None, 2, sequence=True))
    assert (stack.layers, stack.axis) == (("layers.layers.0", "layers.layers.1"), 0)
    assert stack.gathering == {"layers.layers.0.linear1", "layers.layers.1.linear1"}
    model, plan = build_own()
    (stack,) = find_stacks(model, resolve_tensor_plan(model, plan, 2, sequence=True))
    assert (stack.layers, stack.axis) == (("1", "2"), 1)
    assert stack.gathering == {"1.attention", "1.gate_up", "2.attention", "2.gate_up"}
    bert = MODELS["bert"]()[0]
    (stack,) = find_stacks(bert, resolve_tensor_plan(bert, None, 2, sequence=True))
    assert "model.bert.encoder.layer.0.attention.self" in stack.gathering


@pytest.mark.parametrize(("model", "plan", "expected"), [
    (mlp(4, 8, 4), None, "expected layers in a Sequential or a ModuleList, .* found none"),
    (Encoder(), PAIR, "found the MultiheadAttention 'layers.layers.0.self_attn'"),
    (Encoder(), HEADS, "found the Linear 'layers.layers.0.linear1'"),
    (nn.Sequential(mlp(4, 8, 4), nn.Linear(4, 4), mlp(4, 8, 4)), None, "found the Linear '1'"),
    (nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8), 1), None, "not supported for a TransformerDecoder"),
])  # fmt: skip
def test_layers_that_may_need_whole_sequences(model, plan, expected):
    with pytest.raises(ValueError, match=f"parallel.sequence: .*{expected}"):
        resolve_tensor_plan(model, plan, 2, sequence=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "cut"), [
    ((7, 3), Cut(0)), ((3, 7), Cut(1)), ((24, 5), Cut(0, 3)), ((5, 24), Cut(1, 3)), ((24,), Cut(0, 2)),
])  # fmt: skip
def test_boxes_of_all_ranks_have_each_element_once(num_ranks, shape, cut):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = []
    for rank in range(num_ranks):
        boxes = cut.boxes(shape, num_ranks, rank)
        own = take(whole, boxes)
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
        assert own.is_contiguous()
        assert torch.equal(own.flatten(), torch.cat([part.flatten() for part in parts]))
        found.append(own.flatten())
    assert torch.equal(torch.cat(found).sort().values, whole.flatten())


def test_packed_projections_are_cut_each_by_itself():
    attention = nn.MultiheadAttention(8, 4)
    boxes = cuts("heads", attention)["in_proj_weight"].boxes((24, 8), 2, 1)
    assert boxes == (((4, 0), (4, 8)), ((12, 0), (4, 8)), ((20, 0), (4, 8)))
    q, k, v = attention.in_proj_weight.chunk(3)
    assert torch.equal(take(attention.in_proj_weight, boxes), torch.cat([q[4:], k[4:], v[4:]]))


def test_the_input_of_a_layer_is_its_first_tensor_and_no_tensor_is_an_error():
    x = torch.ones(2)
    assert map_input(lambda x: x + 1, (x, 3), {"y": 4})[0][0].tolist() == [2, 2]
    args, kwargs = map_input(lambda x: x + 1, (), {"flag": 1, "x": x})
    assert (args, kwargs["flag"], kwargs["x"].tolist()) == ((), 1, [2, 2])
    for args, kwargs in (((), {}), ((3,), {"x": x}), ((), {"flag": 1})):
        with pytest.raises(ValueError, match="expected a tensor as the first argument, found"):
            map_input(lambda x: x, args, kwargs)
