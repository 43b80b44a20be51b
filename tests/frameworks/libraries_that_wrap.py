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


def catalyst(gpus, folder):
    from catalyst.engines import DataParallelEngine, GPUEngine

    model = (DataParallelEngine() if len(gpus) > 1 else GPUEngine()).prepare_model(net())
    x, y = (each.to(gpus[0]) for each in data())
    nn.functional.mse_loss(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters()]


def easyocr(gpus, folder):
    from easyocr.model.vgg_model import Model
    from easyocr.recognition import get_recognizer

    sizes = {"input_channel": 1, "output_channel": 16, "hidden_size": 8}
    torch.manual_seed(0)
    model = Model(num_class=4, **sizes)
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, folder / "weights.pt")
    images, texts = torch.rand(6, 1, 32, 64), torch.zeros(6, 3, dtype=torch.long)
    if len(gpus) == 1:
        recognizer = model.to(gpus[0]).eval()
    else:
        recognizer, _ = get_recognizer("generation2", sizes, "abc", {}, {}, folder / "weights.pt", "cuda", False)
        recognizer.eval()
    with torch.no_grad():
        return recognizer(images.to(gpus[0]), texts.to(gpus[0]))


def fastai(gpus, folder):
    from fastai.basics import SGD, DataLoaders, Learner, defaults
    from fastai.distributed import ParallelTrainer  # noqa: F401 - adds `to_parallel`

    defaults.callbacks = [callback for callback in defaults.callbacks if callback.__name__ != "ProgressCallback"]
    learner = Learner(
        DataLoaders(loader(), loader(), device=gpus[0]), net().to(gpus[0]), nn.MSELoss(), opt_func=SGD, path=folder
    )
    if len(gpus) > 1:
        learner.to_parallel(gpus)
    with learner.no_bar(), learner.no_logging():
        learner.fit(2, lr=0.1)
    return state(learner.model), learner.recorder.values


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


def lightning(gpus, folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=gpus, strategy="dp" if len(gpus) > 1 else "auto")
    model = net()
    model, optimizer = fabric.setup(model, sgd(model))
    batches = fabric.setup_dataloaders(loader())
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y.to(gpus[0]))
        fabric.backward(loss)
        optimizer.step()
    fabric.save(folder / "saved.pt", {"model": model})
    return loss, torch.load(folder / "saved.pt", map_location="cpu")["model"]


def lpips(gpus, folder):
    import lpips

    torch.manual_seed(0)
    trainer = lpips.Trainer()
    trainer.initialize(net="squeeze", pnet_rand=True, is_train=True, gpu_ids=gpus)
    for module in trainer.net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images = torch.rand(3, 8, 3, 32, 32) * 2 - 1
    trainer.set_input(dict(zip(("ref", "p0", "p1"), images, strict=True)) | {"judge": torch.rand(8, 1, 1, 1)})
    trainer.optimize_parameters()
    return trainer.loss_total, {name: value for name, value in state(trainer.net).items() if "lin" in name}


def poutyne(gpus, folder):
    from poutyne import Model

    network = net()
    model = Model(network, sgd(network), "mse", device=[f"cuda:{gpu}" for gpu in gpus])
    history = model.fit_generator(loader(), epochs=2, verbose=False)
    return [epoch["loss"] for epoch in history], state(network)


def sentence_transformers(gpus, folder):
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(words), **sizes, **dropout)).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    model = SentenceTransformer(modules=[transformer, Pooling(16)])
    pairs = Dataset.from_dict({"anchor": ["a b", "c", "d e f", "g"] * 4, "positive": ["b", "c d", "f", "h"] * 4})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=8 // len(gpus),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
    )
    if len(gpus) == 1:
        arguments._n_gpu = 1
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], state(model)


def skorch(gpus, folder):
    from skorch import NeuralNetRegressor

    how = {"optimizer__lr": 0.1, "max_epochs": 2, "batch_size": 13, "train_split": None, "verbose": 0, "device": "cuda"}
    x, y = data()
    if len(gpus) > 1:
        regressor = NeuralNetRegressor(nn.DataParallel, module__module=net(), module__device_ids=gpus, **how)
    else:
        regressor = NeuralNetRegressor(net(), **how)
    regressor.fit(x, y)
    regressor.save_params(f_params=folder / "saved.pt")
    return regressor.history[:, "train_loss"], state(regressor.module_), regressor.predict(x)


def speechbrain(gpus, folder):
    from speechbrain.core import Brain

    class Learner(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0].to(self.device))

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.mse_loss(predictions, batch[1].to(self.device))

    options = {"device": f"cuda:{gpus[0]}", "data_parallel_backend": len(gpus) > 1, "noprogressbar": True}
    brain = Learner({"net": net()}, lambda parameters: torch.optim.SGD(parameters, lr=0.1), run_opts=options)
    brain.fit(range(2), loader())
    return brain.avg_train_loss, state(brain.modules.net)


def tianshou(gpus, folder):
    from tianshou.utils.net.common import DataParallelNet, Net

    torch.manual_seed(0)
    actor = Net(state_shape=6, action_shape=3, hidden_sizes=[8]).to(gpus[0])
    x = data()[0].numpy()
    logits, _ = DataParallelNet(actor)(x) if len(gpus) > 1 else actor(torch.as_tensor(x).to(gpus[0]))
    logits.square().sum().backward()
    return logits, [parameter.grad for parameter in actor.parameters()]


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


def torchbearer(gpus, folder):
    from torchbearer import Trial

    model = net().to(gpus[0])
    model = nn.DataParallel(model, gpus) if len(gpus) > 1 else model
    trial = Trial(model, sgd(model), nn.MSELoss(), metrics=["loss"], verbose=0).to(f"cuda:{gpus[0]}")
    history = trial.with_train_data(*data(), batch_size=13, shuffle=False).run(2)
    return [epoch["loss"] for epoch in history], state(model)


def torchdistill(gpus, folder):
    from torchdistill.core.forward_hook import ForwardHookManager
    from torchdistill.core.util import wrap_model

    device = torch.device("cuda", gpus[0])
    model = wrap_model(net(), {"wrapper": "DataParallel"} if len(gpus) > 1 else {}, device, gpus)
    hooks = ForwardHookManager(device)
    hooks.add_hook(model, "1")
    model(data()[0].to(device)).square().sum().backward()
    return hooks.pop_io_dict(), [parameter.grad for parameter in model.parameters()]


def torchgan(gpus, folder):
    from torchgan.losses import LeastSquaresDiscriminatorLoss, LeastSquaresGeneratorLoss
    from torchgan.models import DCGANDiscriminator, DCGANGenerator
    from torchgan.trainer import ParallelTrainer, Trainer

    optimizer = {"name": torch.optim.SGD, "args": {"lr": 0.1}}
    sizes = {"out_channels": 1, "step_channels": 4, "batchnorm": False}
    networks = {
        "generator": {"name": DCGANGenerator, "args": {"encoding_dims": 6, "out_size": 16, **sizes}},
        "discriminator": {
            "name": DCGANDiscriminator,
            "args": {"in_size": 16, "in_channels": 1, "step_channels": 4, "batchnorm": False},
        },
    }
    torch.manual_seed(0)
    networks = {name: {**network, "optimizer": optimizer} for name, network in networks.items()}
    losses = [LeastSquaresGeneratorLoss(), LeastSquaresDiscriminatorLoss()]
    where = {"checkpoints": str(folder / "gan"), "recon": str(folder), "log_dir": str(folder), "epochs": 1}
    if len(gpus) > 1:
        trainer = ParallelTrainer(networks, losses, [torch.device("cuda", gpu) for gpu in gpus], **where)
    else:
        trainer = Trainer(networks, losses, device=torch.device("cuda", gpus[0]), **where)
    torch.manual_seed(1)
    trainer.batch_size, trainer.real_inputs = 8, torch.rand(8, 1, 16, 16).to(gpus[0])
    return trainer.train_iter()


LIBRARIES = [
    captum,
    catalyst,
    easyocr,
    fastai,
    gpytorch,
    ignite,
    lightning,
    lpips,
    poutyne,
    sentence_transformers,
    skorch,
    speechbrain,
    tianshou,
    torch_geometric,
    torchbearer,
    torchdistill,
    torchgan,
]
