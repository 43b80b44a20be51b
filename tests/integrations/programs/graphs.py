"""Lists of graphs: each GPU gets some of them, and makes one batch of its own. The wrapper's ``forward`` is new."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Graph:
    def __init__(self, x, edges, y):
        self.x, self.edges, self.y = x, edges, y

    @classmethod
    def batch(cls, graphs, device):
        starts = torch.tensor([0, *(len(graph.x) for graph in graphs)]).cumsum(0)
        edges = torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=False)], 1)
        made = cls(torch.cat([graph.x for graph in graphs]).to(device), edges.to(device), None)
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        made.owner = torch.arange(len(graphs)).repeat_interleave(sizes).to(device)
        made.count = len(graphs)
        return made


class GraphDataParallel(nn.DataParallel):
    def forward(self, graphs):
        if not graphs:
            return None
        batches = self.scatter(graphs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.module(*batches[0])
        replicas = self.replicate(self.module, self.device_ids[: len(batches)])
        outputs = self.parallel_apply(replicas, batches, None)
        return self.gather(outputs, self.output_device)

    def scatter(self, graphs, device_ids):
        nodes = torch.tensor([len(graph.x) for graph in graphs]).cumsum(0)
        place = ((nodes - 1) * len(device_ids) // nodes[-1]).tolist()
        groups = [
            [graph for graph, at in zip(graphs, place, strict=False) if at == gpu] for gpu in range(len(device_ids))
        ]
        groups = [group for group in groups if group]
        return [(Graph.batch(group, f"cuda:{gpu}"),) for gpu, group in zip(device_ids, groups, strict=False)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, graph):
        source, target = graph.edges
        messages = self.first(graph.x)
        self.seen.add_(graph.count)
        x = messages.index_add(0, target, messages[source]).relu()
        return self.second(x.new_zeros(graph.count, 8).index_add(0, graph.owner, x))


model = GraphDataParallel(Net()).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(4):
    sizes = torch.randint(3, 7, (9 - 3 * (step == 3),)).tolist()
    graphs = [Graph(torch.randn(n, 4), torch.randint(n, (2, 2 * n)), torch.randn(1)) for n in sizes]
    y = torch.cat([graph.y for graph in graphs]).cuda()
    loss = nn.functional.mse_loss(model(graphs).view(-1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.9f} seen {model.module.seen.item():.1f}")
