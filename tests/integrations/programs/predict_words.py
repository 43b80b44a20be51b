"""A language model, trained in the way of torch's example on words, with random words. It prints losses."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["LSTM", "GRU"], default="LSTM")
parser.add_argument("--device", default="cuda")
parser.add_argument("--device-ids", nargs="*", help="default: all GPUs")
parser.add_argument("--one-device", action="store_true", help="no data parallelism")
parser.add_argument("--double", action="store_true", help="train in float64")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=10)
parser.add_argument("--bptt", type=int, default=7)
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--clip", type=float, default=0.25)

VOCABULARY = 30
WIDTH = 12


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, hidden):
        self.rnn.flatten_parameters()
        output, hidden = self.rnn(self.encoder(words), hidden)
        return F.log_softmax(self.decoder(output), dim=-1), hidden

    def init_hidden(self, size):
        zeros = next(self.parameters()).new_zeros(2, size, WIDTH)
        return (zeros, zeros.clone()) if self.kind == "LSTM" else zeros


def repackage(hidden):
    """Ends the graph: the next batch begins with the values only."""
    return hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(repackage(each) for each in hidden)


def batchify(words, columns):
    """Words in as many columns as there are samples, of shape (words of a column, columns)."""
    rows = len(words) // columns
    return words[: rows * columns].view(columns, -1).t().contiguous()


def run_epoch(model, source, args, lr=None):
    total, model_itself = 0.0, model.module if isinstance(model, nn.DataParallel) else model
    hidden = model_itself.init_hidden(source.size(1))
    for start in range(0, len(source) - 1, args.bptt):
        words = source[start : start + args.bptt][: len(source) - 1 - start]
        target = source[start + 1 : start + 1 + len(words)].reshape(-1)
        model.zero_grad()
        output, hidden = model(words, repackage(hidden))
        loss = F.nll_loss(output.view(-1, VOCABULARY), target)
        total += loss.item() * len(words)
        if lr is not None:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-lr)
            print(f"loss {loss.item():.12f} norm {norm.item():.12f}")
    return total / (len(source) - 1)


def main(args):
    torch.manual_seed(0)
    model = Recurrent(args.model).to(args.device)
    if not args.one_device:
        model = nn.DataParallel(model, args.device_ids, dim=1)
    torch.manual_seed(1)
    words = torch.randint(0, VOCABULARY, (250,), device=args.device)
    lr, best = args.lr, math.inf
    for _ in range(args.epochs):
        model.train()
        run_epoch(model, batchify(words, args.batch_size), args, lr)
        model.eval()
        with torch.no_grad():
            mean = run_epoch(model, batchify(words[:60], 3), args)
        print(f"mean loss {mean:.12f} perplexity {math.exp(mean):.6f}")
        if mean < best:
            best = mean
        else:
            lr /= 4


if __name__ == "__main__":
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)
    main(arguments)
