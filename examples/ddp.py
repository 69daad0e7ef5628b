"""A DDP training as it is written for torchrun: a model on data that it makes up, a checkpoint after every few steps.

Nothing in it is elastic_driver's. It runs under torchrun, and is restarted from its checkpoint when a worker fails:

    torchrun --nproc-per-node=2 --max-restarts=3 examples/ddp.py

and under elasticrun, in which a worker that is started again need not import torch again, since it is forked from a
process that has. Hosts may come and go meanwhile: the second command's are in a file called ``hosts``, which has one
line ``localhost:2``, say, and later another one ``127.0.0.1:2``:

    elasticrun --nproc-per-node=2 --max-restarts=3 examples/ddp.py
    elasticrun -np 2 --min-np 1 --max-np 4 --host-discovery-script examples/discover_hosts.sh python examples/ddp.py

With ``--ask`` it asks once a step whether a change is due, and writes its checkpoint then: no step is done twice. That
works under torchrun, too. To lose no process at all, see the end of this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 28 x 28 and what they show: ten patterns, each time under other noise."""
    made_of = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 28 * 28, generator=made_of)
    labels = torch.randint(10, (count,), generator=made_of)
    return patterns[labels] + torch.randn(count, 28 * 28, generator=made_of), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step (default 32)")
    parser.add_argument("--every", type=int, default=20, help="a checkpoint each so many steps (default 20)")
    parser.add_argument("--checkpoint", type=Path, default=Path("ddp.pt"), help="its file (default ddp.pt)")
    parser.add_argument("--ask", action="store_true", help="ask whether a change is due")
    options = parser.parse_args()

    # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where, as torchrun sets them.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(28 * 28, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins at step {step}", flush=True)

    def save() -> None:
        if dist.get_rank() == 0:
            new = options.checkpoint.with_suffix(".new")
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            new.replace(options.checkpoint)  # a reader finds the old one or the new one, and never a half

    images, labels = (each.to(device) for each in digits(4096))
    while step < options.steps:
        # Each rank takes its own part of a batch that only the step determines: so it does not matter who is there.
        drawn = torch.Generator().manual_seed(step)
        batch = torch.randint(len(images), (dist.get_world_size(), options.batch), generator=drawn)[dist.get_rank()]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        step += 1
        if options.ask:
            import elastic_driver

            if elastic_driver.checkpoint_point(step=step):
                save()
                print(f"rank {dist.get_rank()} makes room at step {step}", flush=True)
                sys.exit(0)
        if step % options.every == 0:
            save()
    save()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is done: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# In place no process ends when others come or go, and nothing is read from a file. Six lines are new (+), two stand for
# others (~), and what was `step` is `state.step`. save(), --ask and destroy_process_group() go.
#
#   +   import elastic_driver.torch as hvd
#
#   ~   hvd.init()                                    # was: dist.init_process_group(...)
#       ...                                           # device, net, optimizer and data as above
#   +   state = hvd.elastic.DDPState(model=net, optimizer=optimizer, step=0)
#
#   +   @hvd.elastic.run
#   +   def train(state):
#   ~       model = state.ddp                         # was: DistributedDataParallel(net)
#           while state.step < options.steps:
#               ...                                   # as above
#               state.step += 1
#   +           state.commit()
#
#   +   train(state)
#
# Ranks and their number are those of a round: ask for them inside train(), behind state.ddp. What else needs the group
# gets it from hvd.process_group() (docs/torch_distributed.md). Run it by the last command above, or alone.
