"""Writes the model in a GGUF file of llama's kind as the files that vLLM reads.

    smollm2.py MODEL.gguf DIRECTORY

Weights are dequantized and written as bf16 safetensors; the rows of the query and key projections
go back from GGUF's order of rotary pairs to that of the original.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""The type that GGUF gives to tokens such as the end of text."""


class Source:
    """A GGUF file: its fields by short names, its tensors by the names of transformers."""

    def __init__(self, path: str) -> None:
        self.reader = gguf.GGUFReader(path)
        self.kind = self.field("general.architecture")
        if self.kind != "llama":
            raise SystemExit(f"{path}: a model of kind llama is wanted, this is {self.kind!r}")
        self.heads = self.of_model("attention.head_count")
        self.kv_heads = self.of_model("attention.head_count_kv")
        self.tokens = self.field("tokenizer.ggml.tokens")

    def field(self, name: str) -> Any:
        """A field by its full name."""
        return self.reader.fields[name].contents()

    def of_model(self, name: str) -> Any:
        """A field of the architecture."""
        return self.field(f"{self.kind}.{name}")

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors, in float32."""
        found = {}
        for tensor in self.reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if tensor.name in OUTER:
                found[OUTER[tensor.name]] = values
                continue
            _, layer, part, _ = tensor.name.split(".")
            if part == "attn_q":
                values = in_halves(values, self.heads)
            elif part == "attn_k":
                values = in_halves(values, self.kv_heads)
            found[f"model.layers.{layer}.{LAYER[part]}.weight"] = values
        return found


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotary pairs that lie beside each other, as first and second halves of a head."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def bf16(values: np.ndarray) -> bytes:
    """Float32 rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_weights(weights: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file: the length of its header, the header, the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, end = [], 0
    for name, values in weights.items():
        chunk = bf16(values)
        offsets = [end, end + len(chunk)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": offsets}
        end += len(chunk)
        chunks.append(chunk)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for chunk in chunks:
            file.write(chunk)


def config(source: Source, *, tied: bool) -> dict[str, Any]:
    """What transformers calls the configuration of this model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": source.of_model("embedding_length"),
        "intermediate_size": source.of_model("feed_forward_length"),
        "num_hidden_layers": source.of_model("block_count"),
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.kv_heads,
        "vocab_size": len(source.tokens),
        "max_position_embeddings": source.of_model("context_length"),
        "rms_norm_eps": source.of_model("attention.layer_norm_rms_epsilon"),
        "rope_theta": source.of_model("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": source.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_tokenizer(source: Source, directory: Path) -> None:
    """The tokenizer: byte-level pairs, each digit by itself."""
    merges = [tuple(merge.split(" ")) for merge in source.field("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(source.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source.field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(source.tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": source.tokens[source.field("tokenizer.ggml.bos_token_id")],
        "eos_token": source.tokens[source.field("tokenizer.ggml.eos_token_id")],
        "model_max_length": source.of_model("context_length"),
        "chat_template": source.field("tokenizer.chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Reads the one, writes the other."""
    source, directory = Source(sys.argv[1]), Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    weights = source.weights()
    write_weights(weights, directory / "model.safetensors")
    tied = "lm_head.weight" not in weights
    (directory / "config.json").write_text(json.dumps(config(source, tied=tied), indent=1))
    write_tokenizer(source, directory)


if __name__ == "__main__":
    main()
