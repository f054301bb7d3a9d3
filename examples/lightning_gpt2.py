"""A GPT-2 from a small configuration, trained with Lightning on neurons: ``python examples/lightning_gpt2.py [foof|adamw|muon]``.

The library knows nothing of Lightning: FOOF is an optimizer like any other, and its statistics are part of its state dict, so that
``Trainer.fit(..., ckpt_path=...)`` goes on exactly where a run has stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from small_gpt import tokens
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import foof

LENGTH = 32


def gpt2(vocabulary: int) -> GPT2LMHeadModel:
    """Two blocks of width 48, embedding and head tied, as GPT-2 is; its ``Conv1D`` layers are covered."""
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def on_neurons(name: str, model: torch.nn.Module) -> Any:
    """FOOF, AdamW on neuron gradients, Muon on neurons. The loss is a mean over tokens, Σ a sum over them: see "Choosing" in the docs."""
    if name == "muon":  # for the matrices inside; embeddings, norms and biases by AdamW
        return foof.Muon(model, lr=0.02, T=5, neurons=["c_proj"], stacked={"c_attn": 3})  # P where no norm stands before; q, k and v apart
    damping = 0.1 * LENGTH
    if name == "foof":
        return foof.FOOF(model, lr=0.05 * LENGTH, damping=damping, momentum=0.9, T=5, rest={"name": "adamw", "lr": 3e-3})
    return foof.precondition(torch.optim.AdamW(model.parameters(), lr=3e-3), model, damping=damping, T=5)


class Language(L.LightningModule):
    def __init__(self, name: str, vocabulary: int) -> None:
        super().__init__()
        self.name, self.gpt2 = name, gpt2(vocabulary)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.gpt2(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        opt = on_neurons(self.name, self.gpt2)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}


def windows(count: int) -> tuple[DataLoader[Any], int]:
    train, _, vocabulary = tokens()
    return DataLoader(TensorDataset(train[: count * LENGTH].view(count, LENGTH)), batch_size=8), vocabulary


def main(name: str = "foof", epochs: int = 2, folder: str | None = None, resume: bool = False, count: int = 80) -> Language:
    """Train; with a folder, save there, and with resume go on from what is there."""
    data, vocabulary = windows(count)
    model = Language(name, vocabulary)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=None if name == "foof" else 1.0,
    )  # fmt: skip
    file = None if folder is None else Path(folder) / "last.ckpt"
    trainer.fit(model, data, ckpt_path=file if resume else None)
    if file is not None:
        trainer.save_checkpoint(file)
    print(f"{name}: loss {float(trainer.callback_metrics['loss']):.3f} after {trainer.global_step} steps")
    return model


if __name__ == "__main__":
    main(*sys.argv[1:2], epochs=5, count=800)
