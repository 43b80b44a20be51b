"""Libraries that wrap a model in ``torch.nn.DataParallel``: the smallest use of each, on one GPU or on several.

A function here is named like the package it needs. It gets a list of GPUs and a folder for files, and returns losses,
outputs or parameters. With several GPUs the library wraps the model; with one it does not, or the wrapper has one slot.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 26


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def loader():
    return DataLoader(TensorDataset(*data()), batch_size=SAMPLES // 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def state(model):
    return {name.removeprefix("module."): value.detach().cpu() for name, value in model.state_dict().items()}


def captum(gpus, folder):
    from captum.attr import LayerConductance, LayerIntegratedGradients

    wrapped = nn.DataParallel(net().to(gpus[0]), gpus)
    x = data()[0].to(gpus[0])
    conductance = LayerConductance(wrapped, wrapped.module[1]).attribute(x, target=0, n_steps=4)
    return conductance, LayerIntegratedGradients(wrapped, wrapped.module[0]).attribute(x, target=0, n_steps=4)


def gpytorch(gpus, folder):
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.kernels.multi_device_kernel import MultiDeviceKernel

    x, y = (each.double().to(gpus[0]) for each in data())
    kernel = ScaleKernel(RBFKernel()).double().to(gpus[0])
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    product = (MultiDeviceKernel(kernel, devices, devices[0]) if len(gpus) > 1 else kernel)(x, x) @ y
    product.square().sum().backward()
    return product, [parameter.grad for parameter in kernel.parameters()]


def ignite(gpus, folder):
    from ignite.distributed import auto_model
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver

    model = auto_model(net()) if len(gpus) > 1 else net().to(gpus[0])
    trainer = create_supervised_trainer(model, sgd(model), nn.MSELoss(), device=f"cuda:{gpus[0]}")
    saver = Checkpoint({"model": model}, DiskSaver(folder), filename_pattern="saved.pt")
    trainer.add_event_handler(Events.COMPLETED, saver)
    trainer.run(loader(), max_epochs=2)
    return trainer.state.output, torch.load(folder / "saved.pt", map_location="cpu")


def poutyne(gpus, folder):
    from poutyne import Model

    network = net()
    model = Model(network, sgd(network), "mse", device=[f"cuda:{gpu}" for gpu in gpus])
    history = model.fit_generator(loader(), epochs=2, verbose=False)
    return [epoch["loss"] for epoch in history], state(network)


def torch_geometric(gpus, folder):
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool
    from torch_geometric.nn.data_parallel import DataParallel

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GCNConv(6, 2)

        def forward(self, batch):
            return global_mean_pool(self.layer(batch.x, batch.edge_index).tanh(), batch.batch)

    graphs = [Data(x=chunk, edge_index=torch.tensor([[0, 1], [1, 0]])) for chunk in data()[0].split(2)]
    torch.manual_seed(0)
    model = Graphs().to(gpus[0])
    if len(gpus) > 1:
        outputs = DataParallel(model, gpus)(graphs)
    else:
        outputs = model(Batch.from_data_list(graphs).to(gpus[0]))
    outputs.square().sum().backward()
    return outputs, [parameter.grad for parameter in model.parameters()]


LIBRARIES = [captum, gpytorch, ignite, poutyne, torch_geometric]
