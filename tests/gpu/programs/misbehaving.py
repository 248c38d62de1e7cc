"""Things that programs do: workers forked before CUDA, torch.compile, a one-process DDP step, exit in mid-work."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def workers() -> None:
    data = TensorDataset(torch.arange(64.0))
    for _ in range(2):
        total = sum(float(batch.cuda().sum()) for (batch,) in DataLoader(data, batch_size=8, num_workers=2))
        assert total == 64 * 63 / 2


def fork_after_cuda() -> None:
    torch.ones(1, device="cuda").sum().item()
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(range(10)) == 45 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert float(torch.ones(100, device="cuda").sum()) == 100


def compiled() -> None:
    f = torch.compile(lambda a: torch.sin(a) * 2 + a.cos())
    x = torch.randn(1000, device="cuda")
    torch.testing.assert_close(f(x), torch.sin(x) * 2 + x.cos())


def ddp() -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[0])
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def leave_in_mid_work() -> None:
    torch.cuda._sleep(200_000_000)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name, "done", flush=True)
