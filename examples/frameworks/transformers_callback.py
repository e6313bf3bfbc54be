"""Transformers: one callback compresses what the ranks of a Trainer send; a small GPT-2 learns to count.

torchrun --standalone --nproc-per-node 2 examples/frameworks/transformers_callback.py

With --updates each rank's optimizer steps with its own gradient, and the ranks send what the optimizers did.
"""

import os
import sys
import tempfile

import torch
import transformers
from sidcomp.frameworks.transformers import Compression

VOCABULARY, LENGTH = 32, 16


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + i) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


transformers.set_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
)
with tempfile.TemporaryDirectory() as folder:
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=16,
            num_train_epochs=2,
            learning_rate=3e-3,
            logging_steps=8,
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
        callbacks=[Compression("int4", updates="--updates" in sys.argv)],
    )
    trainer.train()

rows = [row for row in trainer.state.log_history if "sidcomp/ratio" in row]
learned = rows[-1]["loss"] < rows[0]["loss"] / 2
print(
    f"rank {os.environ['RANK']}: loss {rows[0]['loss']:.2f} to {rows[-1]['loss']:.2f}, "
    f"{rows[-1]['sidcomp/ratio']:.1f} times fewer bytes"
)
trainer.accelerator.end_training()
raise SystemExit(not learned)
