"""Recognises speech: packed sequences inside of the wrapper, a loss of alignments, a row of lengths for each device."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Recognises(nn.Module):
    def __init__(self):
        super().__init__()
        self.normal = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList(
            [nn.GRU(5, 7, batch_first=True, bidirectional=True), nn.GRU(14, 6, batch_first=True)]
        )
        self.output = nn.Linear(6, 9)

    def forward(self, sound, lengths):
        longest = sound.size(1)
        x = self.normal(sound.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            layer.flatten_parameters()
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=longest)
        return self.output(x).log_softmax(-1), lengths


model = nn.DataParallel(Recognises().cuda())
loss_of = nn.CTCLoss(zero_infinity=True, reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, nesterov=True)
for step, batch in enumerate((8, 8, 5, 3)):
    lengths = torch.randint(8, 13, (batch,))
    sound = torch.randn(batch, 12, 5)
    letters, counts = torch.randint(1, 9, (batch, 4)), torch.randint(2, 5, (batch,))
    scores, sizes = model(sound.cuda(), lengths.cuda())
    loss = loss_of(scores.transpose(0, 1).cpu(), letters, sizes.cpu(), counts) / batch
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 400)
    optimizer.step()
    print(f"step {step}: loss {loss.item():.9f} norm {norm.item():.9f}")
torch.save(model.module.state_dict(), "speech.pth")
alone = Recognises().cuda()
alone.load_state_dict(torch.load("speech.pth"))
alone.eval(), model.eval()
with torch.no_grad():
    found, expected = model(sound.cuda(), lengths.cuda())[0], alone(sound.cuda(), lengths.cuda())[0]
    print(f"difference {(found - expected).abs().max().item():.6f} best {found.argmax(-1).sum().item()}.0")
