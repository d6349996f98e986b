"""Writes a model of two small layers with random weights: for tests in which only bytes matter.

    tiny.py DIRECTORY

Its tokens are bytes. The weights are drawn from a fixed seed, wide enough that greedy tokens differ
from prompt to prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))
from smollm2 import write_weights

SEED = 20
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 128, 256, 2, 4, 2, 2048
HEAD = HIDDEN // HEADS
END = "<|endoftext|>"


def main() -> None:
    """Draws and writes it."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, END])}
    shapes = {"model.embed_tokens": (len(vocabulary), HIDDEN)}
    for layer in range(LAYERS):
        attention, inner = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj": (HEADS * HEAD, HIDDEN),
            f"{attention}.k_proj": (KV_HEADS * HEAD, HIDDEN),
            f"{attention}.v_proj": (KV_HEADS * HEAD, HIDDEN),
            f"{attention}.o_proj": (HIDDEN, HEADS * HEAD),
            f"{inner}.gate_proj": (INNER, HIDDEN),
            f"{inner}.up_proj": (INNER, HIDDEN),
            f"{inner}.down_proj": (HIDDEN, INNER),
        }
    random = np.random.default_rng(SEED)
    weights = {
        f"{name}.weight": random.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = ["model.norm"] + [
        f"model.layers.{layer}.{name}_layernorm"
        for layer in range(LAYERS)
        for name in ("input", "post_attention")
    ]
    weights |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    write_weights(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": vocabulary[END],
        "bos_token_id": vocabulary[END],
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
