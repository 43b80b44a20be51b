"""Answers requests with a model on all devices. Requests that wait at the same time share one call.

    python examples/serve.py

Inside ``frozen()`` the replicas are made once, and no weights are sent. It takes all accelerators; without any, two
slots on the CPU. Replace ``client`` by your web framework.
"""

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from dataparallel import DataParallel

CLIENTS, REQUESTS, LARGEST_BATCH, WIDTH = 16, 50, 32, 256

slots = list(range(torch.accelerator.device_count())) or ["cpu", "cpu"]
device = torch.device(slots[0])
waiting = queue.SimpleQueue()  # pairs of a request and the future of its answer
sizes = []  # of the batches that have been answered


def ask(request):
    """What a client calls. Returns the answer."""
    answer = Future()
    waiting.put((request, answer))
    return answer.result()


@torch.inference_mode()
def serve(model):
    """Answers requests until ``None`` is in the queue."""
    with model.options.frozen():
        for first in iter(waiting.get, None):
            batch = [first]
            while batch[-1] is not None and len(batch) < LARGEST_BATCH and not waiting.empty():
                batch.append(waiting.get())
            if batch[-1] is None:
                waiting.put(batch.pop())  # it ends the loop after this batch
            answer_all(model, *zip(*batch))
            sizes.append(len(batch))


def answer_all(model, requests, answers):
    """An error of the model is the error of these requests. The server goes on."""
    try:
        outputs = model(torch.stack(requests)).cpu()
    except Exception as error:
        for answer in answers:
            answer.set_exception(error)
    else:
        for answer, output in zip(answers, outputs):
            answer.set_result(output)


def client(number):
    """Sends one request after the other. Returns the largest difference from what the plain model answers."""
    requests = torch.randn(REQUESTS, WIDTH, generator=torch.Generator().manual_seed(number))
    answers = torch.stack([ask(request) for request in requests])
    with torch.inference_mode():
        return (answers - plain(requests.to(device)).cpu()).abs().max().item()


torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
plain.eval().to(device)
server = threading.Thread(target=serve, args=[DataParallel(plain, slots)])
server.start()
begin = time.perf_counter()
with ThreadPoolExecutor(CLIENTS) as clients:
    worst = max(clients.map(client, range(CLIENTS)))
seconds = time.perf_counter() - begin
waiting.put(None)
server.join()
print(f"{sum(sizes)} requests of {CLIENTS} clients in {len(sizes)} calls on {len(slots)} slots")
print(f"{sum(sizes) / seconds:,.0f} requests a second")
print(f"largest difference from the plain model: {worst:.1e}")
