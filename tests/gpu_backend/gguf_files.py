"""Tiny GGUF files: a whole Qwen 2 with its tokenizer, and headers alone."""

import gguf
import numpy as np

TOKENS = [*(chr(c) for c in range(33, 127)), "Ġ", "ab", "<|endoftext|>"]
HIDDEN, LAYERS, FFN = 32, 2, 48


def write_gguf(path, architecture="qwen2", weights=True, seed=0):
    """float32 weights and a byte-level BPE vocabulary without merges."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_tags(["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_pad_token_id(len(TOKENS) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    rng = np.random.default_rng(seed)
    for name, shape in _shapes().items() if weights else ():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes():
    kv = HIDDEN // 2
    layer = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_q.bias": (HIDDEN,),
        "attn_k.bias": (kv,),
        "attn_v.bias": (kv,),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    layers = {f"blk.{n}.{k}": shape for n in range(LAYERS) for k, shape in layer.items()}
    ends = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return ends | layers
