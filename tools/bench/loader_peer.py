#!/usr/bin/env python3
"""Python's DataLoader over Fashion-MNIST with random crop and flip: examples per second.

    loader_peer.py --data_dir=DIR --num_workers=1 --batch_size=64 --passes=3

Prints one JSON line. loader.py runs it beside ours.
"""

import argparse
import json
import time

import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from train_peer import find, read_idx

PADDING = 4


class Images(Dataset):
    """The transforms of ddp/data/augment.h, image by image, as torchvision has them."""

    def __init__(self, folder, examples):
        self.images = read_idx(find(folder, "train-images-idx3-ubyte"))[:examples].unsqueeze(1)
        self.labels = read_idx(find(folder, "train-labels-idx1-ubyte"))[:examples].long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].float().div_(255).sub_(0.2860).div_(0.3530)
        y, x = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
        height, width = image.shape[-2:]
        image = pad(image, [PADDING] * 4)[..., y : y + height, x : x + width]
        if torch.rand(()).item() < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--examples", type=int, default=60000)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    data = Images(options.data_dir, options.examples)
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True,
                        num_workers=options.num_workers,
                        persistent_workers=options.num_workers > 0)  # fmt: skip
    rates = []
    for _ in range(options.passes):
        began, examples, labels = time.perf_counter(), 0, 0
        for image, label in loader:
            examples += len(image)
            labels += int(label.sum())
        rates.append(examples / (time.perf_counter() - began))
    print(json.dumps({"examples_per_s": max(rates), "examples": examples, "labels": labels}))


if __name__ == "__main__":
    main()
