"""Small models that can be cut over tensor ranks, each with its plan, or None for its default."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 21, 7, 16


def build_chain():
    layers = [
        nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH), nn.Dropout(0.1), nn.LayerNorm(WIDTH)
    ]  # fmt: skip
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY)), None


class Encoder(nn.Module):
    """A language model of torch's Transformer layers, with packed projections."""

    def __init__(self, *, tied=False, dropout=0.1, norm_first=False, layers=2, heads=4, batch_first=True):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, heads, 24, dropout=dropout, batch_first=batch_first, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.batch_first = batch_first
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        if not self.batch_first:
            return self.head(self.layers(x.transpose(0, 1))).transpose(0, 1)
        padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, LENGTH - 2, LENGTH, LENGTH - 1, LENGTH])[:, None]
        return self.head(self.layers(x, mask=torch.ones(LENGTH, LENGTH).triu(1).bool(), src_key_padding_mask=padding))


def build_encoder():
    return Encoder(batch_first=False), None


def build_tied():
    layers = {"layers.layers.*.self_attn": "heads", "layers.layers.*.linear1": "colwise",
              "layers.layers.*.linear2": "rowwise"}  # fmt: skip
    return Encoder(tied=True, norm_first=True), {"embed": "vocab", **layers}


class CrossAttention(nn.Module):
    """Attention to other features, whose weights count too: separate projections and a mask of each head."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True, kdim=8, vdim=12)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        mask = torch.arange(5 * 4 * LENGTH * LENGTH).view(-1, LENGTH, LENGTH) % 5 == 0
        out, weights = self.attention(x, x[..., :8], x[..., :12], attn_mask=mask)
        _, by_head = self.attention(x, x[..., :8], x[..., :12], average_attn_weights=False)
        return self.head(out) + weights.sum(-1, keepdim=True) * weights[..., :1] + by_head[:, 1, :, :1]


def build_cross():
    return CrossAttention(), {"attention": "heads"}


class OwnBlock(nn.Module):
    """Attention written by hand, with norms of queries within it, and gate and up in one weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), OwnAttention()
        self.gate_up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)
        self.drop, self.scale = nn.Dropout(0.1), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.scale * self.down(self.drop(F.silu(gate) * up))


class OwnAttention(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n) for n in (16, 8, 8, 16))
        self.q_norm = nn.RMSNorm(self.head_dim)

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:-1], -1, self.head_dim) for p in (self.q, self.k, self.v))
        q, k, v = self.q_norm(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        p = 0.1 if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def build_own():
    plan = {"*.attention.q": "colwise", "*.attention.k": "colwise", "*.attention.v": "colwise",
            "*.attention.o": "rowwise", "*.attention.q_norm": "replicated_with_grad_allreduce",
            "*.gate_up": "packed_colwise", "*.down": "rowwise", "3": "sequence", "4": "colwise_rep"}  # fmt: skip
    layers = [nn.Linear(WIDTH, WIDTH), OwnBlock(), OwnBlock(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*layers), plan


class Logits(nn.Module):
    """A model of Hugging Face that returns its logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, use_cache=False).logits


_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 24, "max_position_embeddings": 16}  # fmt: skip


def build_bert():
    from transformers import BertConfig, BertForMaskedLM

    return Logits(BertForMaskedLM(BertConfig(**_SIZES))), None


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    return Logits(GPT2LMHeadModel(config)), None


def build_checkpointed():
    """GPT-2 whose layers are computed again in the backward pass."""
    model, plan = build_gpt2()
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, plan


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SIZES, num_key_value_heads=2, attention_dropout=0.1)
    return Logits(LlamaForCausalLM(config)), None


def build_neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return Logits(GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES, attention_dropout=0.1, hidden_dropout=0.1))), None


def build_qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Logits(Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=4))), None


MODELS = {
    "chain": build_chain, "encoder": build_encoder, "tied": build_tied, "cross": build_cross, "own": build_own,
    "bert": build_bert, "gpt2": build_gpt2, "llama": build_llama, "neox": build_neox, "qwen3": build_qwen3,
    "checkpointed": build_checkpointed,
}  # fmt: skip


def batches(name, count):
    """Features and labels of some batches."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
        label = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
        numbers = torch.randn(5, LENGTH, WIDTH, generator=generator)
        found.append((numbers if name in ("chain", "cross", "own") else tokens, label))
    return found
