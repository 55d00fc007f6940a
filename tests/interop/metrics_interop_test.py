"""ddp::metrics over three ranks have the values of formulas in numpy and torch over all examples."""

import json
import os
import subprocess
import unittest

import numpy
import torch
import xml_unittest

PEER = os.path.join(
    os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "tests/interop/metrics_peer"
)


def area_under_curve(scores, positive):
    """The trapezoidal rule over all thresholds."""
    thresholds = numpy.concatenate([[numpy.inf], numpy.unique(scores)[::-1]])
    true = [(scores[positive] >= t).mean() for t in thresholds]
    false = [(scores[~positive] >= t).mean() for t in thresholds]
    return sum(
        (false[i + 1] - false[i]) * (true[i + 1] + true[i]) / 2 for i in range(len(true) - 1)
    )


class MetricsInteropTest(unittest.TestCase):
    def ours(self, classes, scores, targets, bounds):
        request = {
            "classes": classes,
            "scores": scores.tolist(),
            "targets": targets.tolist(),
            "bounds": bounds,
        }
        done = subprocess.run(
            [PEER], input=json.dumps(request), capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    def check(self, seed, classes, size, bounds, rounded):
        torch.manual_seed(seed)
        scores = torch.randn(size, classes) * 2
        if rounded:  # ties, but not between the classes of one example, whose order torch.topk does not define
            scores = scores.round() + torch.arange(classes) / 64
        targets = torch.randint(0, classes, (size,))
        scores[torch.arange(size), targets] += 1
        targets[:: 7] = -100
        ours = self.ours(classes, scores, targets, bounds)
        values = ours["values"]

        kept = targets != -100
        logits, labels = scores[kept], targets[kept]
        predicted = logits.argmax(1)
        self.assertEqual(values["accuracy"], (predicted == labels).double().mean().item())
        top2 = (logits.topk(2).indices == labels[:, None]).any(1)
        self.assertEqual(values["accuracy_top2"], top2.double().mean().item())
        confusion = numpy.zeros((classes, classes), dtype=int)
        numpy.add.at(confusion, (labels.numpy(), predicted.numpy()), 1)
        self.assertEqual(ours["confusion"], confusion.tolist())

        true = numpy.diag(confusion).astype(float)
        support, taken = confusion.sum(1), confusion.sum(0)
        occurs = support + taken > 0
        f1 = 2 * true[occurs] / (support + taken)[occurs]
        self.assertAlmostEqual(values["f1_macro"], f1.mean(), places=13)
        self.assertAlmostEqual(
            values["f1_weighted"], (f1 * support[occurs]).sum() / support.sum(), places=13
        )
        self.assertAlmostEqual(values["f1_micro"], true.sum() / support.sum(), places=13)

        area = area_under_curve(scores[:, 1].numpy(), (targets == 1).numpy())
        if (targets == 1).any():
            self.assertAlmostEqual(values["auc"], area, places=12)
        else:
            self.assertIsNone(values["auc"])  # NaN: there is no such example
        loss = torch.nn.functional.cross_entropy(scores.double(), targets)
        self.assertAlmostEqual(values["perplexity"] / loss.exp().item(), 1, places=5)
        weights = scores[:, 1].double().abs()
        mean = (scores[:, 0].double() * weights).sum() / weights.sum()
        self.assertAlmostEqual(values["mean"], mean.item(), places=12)

    def test_values(self):
        for seed, (classes, size, bounds) in enumerate(
            [(3, 50, [0, 10, 11, 50]), (10, 300, [0, 0, 299, 300]), (40, 60, [0, 60, 60, 60])]
        ):
            for rounded in (False, True):
                with self.subTest(classes=classes, rounded=rounded):
                    self.check(seed, classes, size, bounds, rounded)


if __name__ == "__main__":
    xml_unittest.main()
