#!/usr/bin/env python3
"""The Python counterpart of `//tools:train --model=gpt`, with torchrun + DDP + Gloo.

    torchrun --standalone --nproc_per_node=2 gpt_peer.py --text=FILE --max_steps=200

The same model, text, windows, split, optimizer and schedule, as a Python user would write them.
Rank 0 prints one JSON line at the end: step times include data loading. compare_train.py runs it
beside ours; tests/interop:gpt_interop_test imports it.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import train_peer

STRETCH = 4096  # tokens; of these, one in 20 is held out


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}
        )
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        q, k, v = (y.view(n, t, self.heads, width // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).contiguous().view(n, t, width))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class Gpt(nn.Module):
    """GPT-2's form, with Linear layers and without dropout; parameters have GPT-2's names."""

    def __init__(self, vocabulary=256, context=128, layers=5, width=128, heads=4):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif "ln_" not in name:
                scale = 2 * layers if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=1 / math.sqrt(width * scale))
        frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
        angles = torch.arange(context).unsqueeze(1) * frequencies
        with torch.no_grad():
            self.wpe.weight.copy_(torch.cat([angles.sin(), angles.cos()], 1)[:, :width] / width**0.5)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)


def windows(text, length):
    """Inputs and targets of the two splits of one document, as docs/language_model.md has them."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    runs = {False: [], True: []}
    for begin in range(0, len(data), STRETCH):
        held_out = begin // STRETCH % 20 == 19
        end = min(begin + STRETCH, len(data))
        if runs[held_out] and runs[held_out][-1][1] == begin:
            runs[held_out][-1][1] = end
        else:
            runs[held_out].append([begin, end])
    splits = []
    for held_out in (False, True):
        inputs, targets = [], []
        for begin, end in runs[held_out]:
            for start in range(begin, end - 1, length):
                n = min(length, end - start - 1)
                pad = (0, length - n)
                inputs.append(functional.pad(data[start : start + n], pad))
                targets.append(functional.pad(data[start + 1 : start + n + 1], pad, value=-100))
        splits.append((torch.stack(inputs), torch.stack(targets)))
    return splits


def adamw(model, lr, weight_decay=0.1):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=lr, weight_decay=weight_decay, fused=True,
    )  # fmt: skip


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def loss_of(model, inputs, targets):
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(inputs, targets, batch_size, seed):
    """Endless batches of this rank, epoch after epoch."""
    sampler = DistributedSampler(inputs, shuffle=True, seed=seed, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for indices in torch.tensor(list(sampler)).split(batch_size):
            if len(indices) == batch_size:
                yield inputs.index_select(0, indices), targets.index_select(0, indices)
        epoch += 1


def bits_per_byte(model, inputs, targets):
    """Of the examples of all ranks, each once."""
    total = torch.zeros(2, dtype=torch.float64)
    mine = range(dist.get_rank(), len(inputs), dist.get_world_size())
    with torch.no_grad():
        for indices in torch.tensor(list(mine)).split(32):
            kept = targets[indices]
            logits = model(inputs[indices]).flatten(0, 1)
            total[0] += functional.cross_entropy(logits, kept.flatten(), reduction="sum")
            total[1] += (kept != -100).sum()
    dist.all_reduce(total)
    return (total[0] / total[1]).item() / math.log(2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True, help="a file of text")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8, help="per rank")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model = Gpt(256, options.context, options.layers, options.width, options.heads)
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model, options.lr)
    schedule = cosine(optimizer, options.max_steps)
    with open(options.text, "rb") as f:
        (inputs, targets), held_out = windows(f.read(), options.context)

    losses, ends = [], []
    for batch in batches(inputs, targets, options.batch_size, options.seed):
        optimizer.zero_grad()
        loss = loss_of(wrapped, *batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
        if len(ends) == 1:
            first_step_end = time.time()
        if len(ends) == min(train_peer.WARMUP_STEPS, options.max_steps):
            pss = train_peer.pss_kib()
        if len(ends) == options.max_steps:
            break
    bits = bits_per_byte(model, *held_out)
    train_peer.report_and_exit(losses, ends, first_step_end, pss, {"test/bits_per_byte": bits})


if __name__ == "__main__":
    main()
