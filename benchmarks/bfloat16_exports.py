"""How far an exact DeepSeek export is from the truth in bfloat16, beside its source.

`python benchmarks/bfloat16_exports.py` makes small random Llamas with transformers, exports them and prints, over
seeds, the ratio of the root mean square errors of the logits against float64: the export's over the source's.
"""

import copy
import math
import tempfile
from pathlib import Path

import torch
import transformers

import rehead
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.conversion.export.deepseek import to_deepseek

SEEDS = 12
SHAPES = {
    "gqa 4/2 x 16": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gqa 8/4 x 16": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
    "mqa 3/1 x 64": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
}


@torch.no_grad()
def ratio(shape, stored, engine, seed):
    """One model's; its weights are rounded to `stored` before anything else."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 200, "num_hidden_layers": 3, "intermediate_size": 2 * shape["hidden_size"]}
    config = transformers.LlamaConfig(**sizes, **shape, rms_norm_eps=1e-5, max_position_embeddings=64)
    source = transformers.LlamaForCausalLM(config).eval()
    for weight in source.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source.to(stored).save_pretrained(place / "llama")
        converted, _ = to_deepseek(rehead.load(place / "llama"), engine)
        stock.export(converted, place / "mla", families["deepseek_v3"], {})
        export = transformers.DeepseekV3ForCausalLM.from_pretrained(place / "mla", dtype=torch.bfloat16)
    ids = torch.randint(1, 200, (4, 60))
    gold = copy.deepcopy(source).double()(ids).logits
    errors = [(model.bfloat16()(ids).logits.double() - gold).square().mean() for model in (export, source)]
    return float((errors[0] / errors[1]).sqrt())


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    print(
        "| source | weights stored in | for | geometric mean | least | most |\n|---|---|---|---:|---:|---:|"
    )
    for name, shape in SHAPES.items():
        for stored in (torch.float32, torch.bfloat16):
            for engine in ("transformers", "vllm") if name.startswith("mqa") else ("transformers",):
                found = [ratio(shape, stored, engine, seed) for seed in range(SEEDS)]
                mean = math.exp(sum(map(math.log, found)) / SEEDS)
                row = f"{mean:.3f} | {min(found):.3f} | {max(found):.3f}"
                print(f"| {name} | {str(stored)[6:]} | {engine} | {row} |", flush=True)
