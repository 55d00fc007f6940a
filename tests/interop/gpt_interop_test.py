"""//tools:train --model=gpt and a plain PyTorch program of the same model train alike.

Both begin with the weights of one checkpoint of GPT-2's form, which Python makes: 10 steps of
AdamW have the same losses. The model that C++ has trained gives the same logits in Python.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import safetensors.torch
import torch
import xml_unittest

RUNFILES = os.environ["TEST_SRCDIR"]
OURS = os.path.join(RUNFILES, os.environ["TEST_WORKSPACE"])
sys.path.insert(0, os.path.join(OURS, "tools/bench"))

import gpt_peer  # noqa: E402

STEPS = 10
SIZES = {"context": 32, "layers": 3, "width": 48, "heads": 3}
LR = 0.003


def of_gpt2(model):
    """The weights as GPT-2's own checkpoints have them: Conv1D keeps [in, out]."""
    weights = {}
    for name, tensor in model.state_dict().items():
        is_layer = ".c_" in name and tensor.dim() == 2
        weights["transformer." + name] = (tensor.t() if is_layer else tensor).contiguous()
    for layer in range(SIZES["layers"]):
        weights["transformer.h.%d.attn.bias" % layer] = torch.ones(1, 1, 64, 64).tril().bool()
    return weights


class GptInteropTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        generator = torch.Generator().manual_seed(5)
        words = [bytes(torch.randint(97, 123, (n % 7 + 2,), generator=generator).tolist()) for n in range(60)]
        chosen = torch.randint(0, 60, (40000,), generator=generator).tolist()
        cls.text = b" ".join(words[i] for i in chosen)
        with open(cls.path("text.txt"), "wb") as f:
            f.write(cls.text)
        torch.manual_seed(1)
        cls.model = gpt_peer.Gpt(256, **SIZES)
        safetensors.torch.save_file(of_gpt2(cls.model), cls.path("gpt2.safetensors"))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    def train(self, ranks, batch_size, *arguments):
        """The losses of a run of ours, whose last checkpoint is in the folder that is returned, too."""
        folder = self.path("run_%d_%d" % (ranks, len(os.listdir(self.folder))))
        command = [os.path.join(OURS, "tools/train"), "--model=gpt", "--files=" + self.path("text.txt")]
        command += ["--%s=%d" % item for item in SIZES.items()]
        command += ["--nproc_per_node=%d" % ranks, "--batch_size=%d" % batch_size, "--seed=7"]
        command += ["--max_steps=%d" % STEPS, "--lr=%g" % LR, "--clip_norm=0", "--log_every=1", "--drop_last"]
        command += ["--test_size=8", "--log_dir=" + folder, "--checkpoint_dir=" + folder]
        command += ["--init_from=" + self.path("gpt2.safetensors"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(os.path.join(folder, "metrics.jsonl")) as f:
            records = [json.loads(line) for line in f]
        losses = [r["train/loss"] for r in records if "train/loss" in r]
        return losses, os.path.join(folder, "epoch_0_step_%d.pt" % STEPS), done.stdout + done.stderr

    def twin(self, batch_size):
        """The same steps in Python, in one process; the model afterwards."""
        model = gpt_peer.Gpt(256, **SIZES)
        model.load_state_dict(self.model.state_dict())
        optimizer = gpt_peer.adamw(model, LR)
        schedule = gpt_peer.cosine(optimizer, STEPS)
        (inputs, targets), _ = gpt_peer.windows(self.text, SIZES["context"])
        sampler = torch.utils.data.DistributedSampler(inputs, 1, 0, seed=7)
        losses = []
        for indices in torch.tensor(list(sampler)).split(batch_size)[:STEPS]:
            optimizer.zero_grad()
            loss = gpt_peer.loss_of(model, inputs[indices], targets[indices])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses, model

    def expect_equal(self, ours, theirs):
        self.assertEqual(len(ours), STEPS)
        for mine, other in zip(ours, theirs):
            self.assertAlmostEqual(mine, other, delta=1e-4)
        self.assertLess(theirs[-1], theirs[0] - 0.3)

    def test_ten_steps_have_equal_losses(self):
        theirs, model = self.twin(16)
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                ours, path, said = self.train(ranks, 16 // ranks)
                self.expect_equal(ours, theirs)
                self.assertIn("12 weights [in, out], as of GPT-2, were transposed", said)
                trained = torch.load(path, weights_only=True)["model"]
                again = gpt_peer.Gpt(256, **SIZES)
                again.load_state_dict(trained)
                tokens = torch.arange(32).unsqueeze(0)
                self.assertTrue(torch.allclose(again(tokens), model(tokens), rtol=1e-2, atol=1e-2))

    def test_names_are_mapped(self):
        weights = {"old." + k: v for k, v in self.model.state_dict().items()}
        safetensors.torch.save_file(weights, self.path("named.safetensors"))
        ours, _, _ = self.train(
            1, 16, "--init_from=" + self.path("named.safetensors"), r"--init_map=^old\.="
        )
        self.expect_equal(ours, self.twin(16)[0])


if __name__ == "__main__":
    xml_unittest.main()
