"""The same GPT-2 with the Hugging Face Trainer, and in a loop of Accelerate: ``python examples/huggingface_gpt2.py [foof|adamw|muon]``.

Give the Trainer the optimizer, and that is all: ``resume_from_checkpoint`` brings the statistics back with the optimizer's state.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from lightning_gpt2 import LENGTH, gpt2, on_neurons
from small_gpt import tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of the text, as the Trainer wants them."""

    def __init__(self, ids: Tensor, count: int) -> None:
        self.windows = ids[: count * LENGTH].view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


class Stop(TrainerCallback):
    """Ends a run in its middle, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def main(name: str = "foof", steps: int = 20, folder: str | None = None, resume: bool = False, stop: int | None = None) -> nn.Module:
    """Train for ``steps`` (or interrupted after ``stop``), with a checkpoint every 5 in the folder; batches are shuffled."""
    train, _, vocabulary = tokens()
    model = gpt2(vocabulary)
    opt = on_neurons(name, model)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
    arguments = TrainingArguments(
        output_dir=folder or tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8, save_steps=5, logging_steps=5,
        report_to="none", disable_tqdm=True, use_cpu=True, seed=0, save_strategy="steps" if folder else "no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Windows(train, 400), optimizers=(opt, schedule))
    if stop is not None:
        trainer.add_callback(Stop(stop))
    trainer.train(resume_from_checkpoint=resume or None)
    return model


def with_accelerate(name: str = "foof", steps: int = 12, folder: str | None = None, resume: bool = False, start: int = 0) -> nn.Module:
    """The usual loop of Accelerate, two batches accumulated per step; ``save_state`` and ``load_state`` carry the statistics."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train, _, vocabulary = tokens()
    model = gpt2(vocabulary)
    loader = DataLoader(Windows(train, 400), batch_size=4)
    prepared, opt, loader = accelerator.prepare(model, on_neurons(name, model), loader)
    if resume:
        accelerator.load_state(folder)
    for number, inputs in enumerate(loader):
        if number // 2 < start:
            continue
        if number // 2 >= steps:
            break
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**inputs).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 10.0)
            opt.step()
            opt.zero_grad()
    if folder is not None and not resume:
        accelerator.save_state(folder)
    return accelerator.unwrap_model(prepared)


if __name__ == "__main__":
    main(*sys.argv[1:2], steps=100)
    with_accelerate(*sys.argv[1:2])
