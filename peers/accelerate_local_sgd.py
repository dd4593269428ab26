"""Hugging Face Accelerate's LocalSGD on laconic's job: every so many steps all models become their mean, in fp32.

    laconic lab run --hosts 4 --link 20mbit -- python peers/accelerate_local_sgd.py --task chars --model gpt-tiny ...

The optimizer stays as it is: Accelerate's wrapper adds gradient accumulation and loss scaling, of which there is none.
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from same_job import leave, parser, train, worker_of


def main() -> None:
    """Be one host."""
    asked = parser(__doc__).parse_args()
    worker = worker_of(asked)
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(worker.model)
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=asked.every) as local_sgd:
        train(worker, net, local_sgd.step)
    leave()


if __name__ == "__main__":
    main()
