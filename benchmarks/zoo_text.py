"""Models of ``transformers``: encoders, decoders with a prompt and with one token and a cache, encoder-decoders,
state-space and recurrent ones, speech, vision. Widths are those of the smallest published model of the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_common import Case, package

ABSENT: dict[str, str] = {}
transformers: Any = package("transformers", ABSENT)
VOCABULARY = 1000
LENGTH = 32

Inputs = Callable[[int], dict[str, Any]]


def ids(batch: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, LENGTH))}


def prompt(batch: int) -> dict[str, Any]:
    return {**ids(batch), "use_cache": False}


def pairs(batch: int) -> dict[str, Any]:
    target = torch.randint(5, VOCABULARY, (batch, LENGTH // 2))
    return {**ids(batch), "decoder_input_ids": target, "use_cache": False}


def wave(batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 8000)}


def picture(size: int = 224) -> Inputs:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def model(kind: str, inputs: Inputs, head: str = "Model", **config: Any) -> Case:
    """A model of ``KINDModel`` (or another head) with ``KINDConfig``."""

    def made(batch: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        options = getattr(transformers, f"{kind}Config")(**config)
        return getattr(transformers, kind + head)(options), (), inputs(batch)

    return made


def encoder(kind: str, layers: str = "num_hidden_layers", head: str = "Model", **config: Any) -> Case:
    return model(kind, ids, head, vocab_size=VOCABULARY, **{layers: 4}, **config)


def decoder(kind: str, layers: str = "num_hidden_layers", head: str = "ForCausalLM", **config: Any) -> Case:
    return model(kind, prompt, head, vocab_size=VOCABULARY, **{layers: 4}, **config)


class OneToken(nn.Module):
    """One step of decoding: a token and the keys and values of those before it; the new ones come back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, token: Tensor, *past: Tensor) -> Any:
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        result = self.inner(input_ids=token, past_key_values=cache, use_cache=True)
        held = result.past_key_values
        return result.logits, [(layer.keys, layer.values) for layer in held.layers]


def one_token(case: Case, heads: int, width: int) -> Case:
    def made(batch: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        past = [torch.randn(batch, heads, LENGTH, width) for _ in range(2 * 4)]
        return OneToken(case(batch)[0]), (torch.randint(5, VOCABULARY, (batch, 1)), *past), {}

    return made


SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
HALF = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
GEMMA = {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
SPEECH = {"num_hidden_layers": 4}

MODELS: dict[str, Case] = {
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta"),
    "distilbert": encoder("DistilBert", "n_layers"),
    "albert": encoder("Albert", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "electra": encoder("Electra"),
    "deberta": encoder("Deberta"),
    "deberta_v2": encoder("DebertaV2", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "mpnet": encoder("MPNet"),
    "convbert": encoder("ConvBert"),
    "fnet": encoder("FNet"),
    "modernbert": encoder("ModernBert", pad_token_id=0),
    "squeezebert": encoder("SqueezeBert"),
    "roformer": encoder("RoFormer"),
    "xlm_roberta": encoder("XLMRoberta"),
    "nystromformer": encoder("Nystromformer", segment_means_seq_len=32, num_landmarks=32),
    "funnel": model("Funnel", ids, vocab_size=VOCABULARY, block_sizes=[1, 1, 2]),
    "gpt2": decoder("GPT2", "n_layer", "LMHeadModel"),
    "gpt_neo": decoder(
        "GPTNeo", "num_layers", attention_types=[[["global", "local"], 2]], hidden_size=768, num_heads=12
    ),
    "gpt_neox": decoder("GPTNeoX", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "gptj": decoder("GPTJ", "n_layer", n_embd=768, n_head=12),
    "opt": decoder("OPT"),
    "bloom": decoder("Bloom", "n_layer", hidden_size=1024, n_head=16),
    "llama": decoder("Llama", **SMALL),
    "mistral": decoder("Mistral", **SMALL),
    "qwen2": decoder("Qwen2", **HALF),
    "qwen3": decoder("Qwen3", **HALF),
    "gemma": decoder("Gemma", **GEMMA),
    "gemma2": decoder("Gemma2", **GEMMA),
    "phi": decoder("Phi", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "stablelm": decoder("StableLm", **HALF),
    "falcon": decoder("Falcon", hidden_size=768, num_attention_heads=12),
    "olmo2": decoder("Olmo2", pad_token_id=0, **SMALL),
    "mixtral": decoder("Mixtral", num_local_experts=4, **SMALL),
    "gpt2, one token": one_token(decoder("GPT2", "n_layer", "LMHeadModel"), 12, 64),
    "llama, one token": one_token(decoder("Llama", **SMALL), 3, 64),
    "qwen2, one token": one_token(decoder("Qwen2", **HALF), 2, 64),
    "t5": model("T5", pairs, vocab_size=VOCABULARY, num_layers=4),
    "bart": model("Bart", pairs, vocab_size=VOCABULARY, d_model=768, encoder_layers=4, decoder_layers=4),
    "marian": model(
        "Marian", pairs, vocab_size=VOCABULARY, d_model=512, encoder_layers=4, decoder_layers=4, pad_token_id=0
    ),
    "pegasus": model("Pegasus", pairs, vocab_size=VOCABULARY, d_model=512, encoder_layers=4, decoder_layers=4),
    "mamba": decoder("Mamba"),
    "mamba2": decoder("Mamba2", hidden_size=768, num_heads=24, head_dim=64),
    "falcon_mamba": decoder("FalconMamba", hidden_size=768),
    "rwkv": decoder("Rwkv", hidden_size=768),
    "recurrent_gemma": decoder(
        "RecurrentGemma", hidden_size=640, intermediate_size=2048, num_attention_heads=10, lru_width=640
    ),
    "wav2vec2": model("Wav2Vec2", wave, **SPEECH),
    "hubert": model("Hubert", wave, **SPEECH),
    "wavlm": model("WavLM", wave, **SPEECH),
    "whisper encoder": lambda batch: (
        transformers.WhisperModel(transformers.WhisperConfig(encoder_layers=4, decoder_layers=1)).encoder,
        (torch.randn(batch, 80, 3000),),
        {},
    ),
    "ast": model("AST", lambda batch: {"input_values": torch.randn(batch, 1024, 128)}, num_hidden_layers=4),
    "vit": model("ViT", picture(), num_hidden_layers=4),
    "deit": model("DeiT", picture(), num_hidden_layers=4),
    "beit": model("Beit", picture(), num_hidden_layers=4),
    "swin": model("Swin", picture(), depths=[1, 1, 1, 1]),
    "convnext": model("ConvNext", picture(), depths=[1, 1, 1, 1]),
    "dinov2": model("Dinov2", picture(), num_hidden_layers=4),
    "segformer": model("Segformer", picture(128), depths=[1, 1, 1, 1]),
    "mobilevit": model("MobileViT", picture(256)),
    "clip_vision": model("CLIPVision", picture(), num_hidden_layers=4),
}
CASES: dict[str, Case] = {f"transformers:{name}": case for name, case in MODELS.items()} if transformers else {}
