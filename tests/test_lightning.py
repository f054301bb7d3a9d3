"""A GPT-2 trained with Lightning on neurons: interrupted and resumed, it ends with the weights of a run that was not."""

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import foof
from cases import flat, mlp

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import lightning_gpt2

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and batch sizes


@pytest.mark.parametrize("name", ["foof", "adamw", "muon"])
def test_resumed_equals_uninterrupted(name, tmp_path, steps):
    straight = lightning_gpt2.main(name, epochs=2)
    all_steps = steps()
    lightning_gpt2.main(name, epochs=1, folder=tmp_path)
    resumed = lightning_gpt2.main(name, epochs=2, folder=tmp_path, resume=True)
    assert steps() == 2 * all_steps
    assert torch.equal(flat(resumed), flat(straight))


def test_it_learns():
    first, later = (lightning_gpt2.main("foof", epochs=n) for n in (1, 4))
    data = next(iter(lightning_gpt2.windows(80)[0]))[0]
    losses = [model.gpt2(input_ids=data, labels=data).loss.item() for model in (first, later)]
    assert losses[1] < 0.9 * losses[0]


class Classifier(L.LightningModule):
    """With curvature of its own: one more line in ``training_step``."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.net = make, mlp(6, 10, 3)

    def training_step(self, batch, _):
        out = self.net(batch[0])
        self.optimizers().update_curvature(out)
        return torch.nn.functional.cross_entropy(out, batch[1])

    def configure_optimizers(self):
        return self.make(self.net)


@pytest.mark.parametrize("make", [
    lambda m: foof.KFAC(m, lr=0.02, damping=0.1, momentum=0.9, T=3), lambda m: foof.NaturalGradient(m, lr=0.05, damping=0.1),
    lambda m: foof.EKFAC(m, lr=0.02, damping=0.1, momentum=0.9, T=3), lambda m: foof.AdamW(m, lr=0.01, T=3),
], ids=["KFAC", "NaturalGradient", "EKFAC", "AdamW"])  # fmt: skip
def test_curvature_of_its_own_resumed_equals_uninterrupted(make, tmp_path):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(80, 6, generator=g), torch.randint(0, 3, (80,), generator=g))

    def fit(epochs, resume=False):
        model = Classifier(make)
        trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=tmp_path / "last.ckpt" if resume else None)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return flat(model)

    straight = fit(2)
    fit(1)
    assert torch.equal(fit(2, resume=True), straight)
