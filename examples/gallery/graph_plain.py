"""A graph network tells trees from graphs with circles, in plain PyTorch: python graph_plain.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def graph(number):
    """A random tree of 6 to 15 nodes, every other one with two more edges: size, edges both ways, and the class."""
    size = 6 + int(torch.randint(10, ()))
    edges = [(node, int(torch.randint(node, ()))) for node in range(1, size)]
    if number % 2:
        edges += torch.randint(size, (2, 2)).tolist()
    return size, torch.tensor(edges + [(b, a) for a, b in edges]).T, number % 2


def together(graphs):
    """One large graph of separate ones, with the number of the graph of each node."""
    sizes = torch.tensor([size for size, _, _ in graphs])
    starts = sizes.cumsum(0) - sizes
    return {
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)], dim=1),
        "graph": torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        "labels": torch.tensor([label for _, _, label in graphs]),
    }


class Network(nn.Module):
    """In each round a node adds up what its neighbours have (GIN, Xu et al. 2019, arXiv 1810.00826)."""

    def __init__(self, width=32, rounds=3):
        super().__init__()
        self.first = nn.Parameter(torch.ones(width) / width)
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(rounds)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, batch):
        source, target = batch["edges"]
        nodes = self.first.expand(len(batch["graph"]), -1)
        for layers in self.rounds:
            nodes = nodes + layers(nodes.index_add(0, target, nodes[source]))
        return self.head(nodes.new_zeros(len(batch["labels"]), nodes.shape[1]).index_add(0, batch["graph"], nodes))


def loss_of(model, batch):
    return cross_entropy(model(batch), batch["labels"])


def accuracy(model, batch):
    return (model(batch).argmax(1) == batch["labels"]).float().mean()


torch.manual_seed(0)
train, test = [graph(number) for number in range(1200)], [graph(number) for number in range(300)]
model = Network()
loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=together)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(8):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch["labels"])
    model.eval()
    with torch.no_grad():
        share = accuracy(model, together(test))
    model.train()
    print(f"epoch {epoch}  loss {total / len(train):.4f}  accuracy {share:.4f}")
