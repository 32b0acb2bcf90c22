"""Models that vLLM's kernels for CPUs compute, which have heads of 32 dimensions, and the words that serve one."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.recipes import vision as tiny_vision
from data.recipes.text import TinyTextRecipe, build_tokenizer, save_tiny_text_model, train_model
from tasks.process import CHECKOUT

PYTHON = CHECKOUT / ".venv-engines" / "bin" / "python"
RANK = 8


def build_qwen(folder: Path, *, hidden: int, layers: int, intermediate: int, steps: int = 0) -> None:
    """Write a Qwen3 with the tiny tokenizer.

    Args:
        steps: of the tiny text model's supervised training; 0: random weights.
    """
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    if steps:
        train_model(model, tokenizer, TinyTextRecipe(steps=steps, learning_rate=2e-3))
    save_tiny_text_model(model.eval(), tokenizer, folder)


def build_qwen_vision(folder: Path, *, steps: int) -> None:
    """Write a Qwen3-VL that says, after so many steps, about where a shape is."""
    recipe = tiny_vision.TinyVisionRecipe(hidden_size=128, vision_hidden_size=128, layers=2, steps=steps)
    processor = tiny_vision.build_processor(recipe)
    model = tiny_vision.build_model(recipe, processor)
    # transformers always interleaves positions in time, height and width; vLLM does where the configuration says so.
    model.config.text_config.rope_parameters["mrope_interleaved"] = True
    tiny_vision.train_model(model, processor, recipe)
    tiny_vision.save_tiny_vision_model(model.eval(), processor, folder)


def server_words(*options: str, **variables: str) -> list[str]:
    """The program of a server, as rollout.vllm.command: what a machine without a GPU needs, and these options."""
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
    # On a CPU an engine dies of a prompt that it computes in two parts where the row has a seed.
    options = ("--enforce-eager", "--no-enable-chunked-prefill", *options)
    program = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    return ["env", *(f"{name}={value}" for name, value in given.items()), *program, *options]


def float32_options(model: Path, context: int, logprobs: str = "processed_logprobs") -> list[str]:
    """The options of a server of a model that can sample a policy in fp32, without adapters."""
    options = {
        "--model": model,
        "--dtype": "float32",
        "--max-model-len": context,
        "--logprobs-mode": logprobs,
        "--max-logprobs": -1,
    }
    return [str(part) for pair in options.items() for part in pair]


ADAPTERS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "3")
"""Options of a server that loads adapters of RANK."""
