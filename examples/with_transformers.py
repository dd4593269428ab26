"""Transformers: use `LaconicTrainer(scheme=...)` instead of `Trainer(...)`.

A checkpoint has `laconic.pt` beside the trainer's files, with the states of
all ranks; `train(resume_from_checkpoint=...)` reads it. For other trainers
write `class Mine(LaconicMixin, SFTTrainer)`. Start it with
`torchrun --nproc-per-node 2 examples/with_transformers.py`.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from laconic.integrations.transformers import LaconicTrainer as Trainer

tokens = torch.randint(100, (160, 16))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=2)
)
arguments = TrainingArguments(
    output_dir=f"{tempfile.gettempdir()}/trainer",
    per_device_train_batch_size=8,
    max_steps=10,
    save_steps=5,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    scheme="streaming",  # laconic: of models, since Trainer steps with AdamW
    model=model,
    args=arguments,
    train_dataset=dataset,
)
trainer.train()
print(trainer.session.stats())  # laconic
