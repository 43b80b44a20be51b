"""A module of Lightning, with batches for it and a trainer that is quiet."""

import torch
from lightning import pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dataparallel.composable import fully_shard

__all__ = ["EPOCHS", "Learner", "fit", "loader", "net", "weights"]

EPOCHS = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loader(batch_size=8, samples=23):
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].tanh()), batch_size=batch_size)


class Learner(lightning.LightningModule):
    """A loop with a loss, a validation and an optimizer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)

    def loss(self, batch):
        x, y = batch
        output = self(x)
        return nn.functional.mse_loss(output, y.to(output.device))

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def place_of(learner):
    """Where Lightning's trainer is to have the module: on the device of the first slot."""
    device = next(learner.parameters()).device
    return {"accelerator": "gpu", "devices": [device.index]} if device.type == "cuda" else {"accelerator": "cpu"}


def fit(learner, folder, checkpoint=None, batches=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        **{"max_epochs": EPOCHS, "default_root_dir": folder, **place_of(learner), **quiet, **settings}
    )
    trainer.fit(learner, batches or loader(), loader(), ckpt_path=checkpoint)
    return trainer


def weights(learner):
    full = fully_shard.full_state_dict(learner)
    return {name.replace("model.module.", "model."): value.cpu() for name, value in full.items()}
