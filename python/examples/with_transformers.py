"""transformers' Trainer with lockstep.attach(): lockstep run -n 2 -- python with_transformers.py. A small random model."""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lockstep


class AttachTrainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = self.attach_model

    def attach_model(self, model, evaluation_mode=False, **_):
        if not evaluation_mode and not hasattr(self, "replica"):
            self.replica = lockstep.attach(model)
        return model


def train(attached=True):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
    tokens = torch.randint(64, (48, 16))
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, report_to=[],
                                    save_strategy="no", disable_tqdm=True, logging_strategy="no", seed=0, eval_strategy="epoch")
        trainer = (AttachTrainer if attached else Trainer)(model, options, train_dataset=examples, eval_dataset=examples[:8])
        trainer.train()
        trainer.evaluate()
    return model


if __name__ == "__main__":
    dist.init_process_group("lockstep")
    train()
    dist.destroy_process_group()
