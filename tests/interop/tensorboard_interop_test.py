"""TensorBoard's reader reads the files of our writer."""

import math
import os
import subprocess
import tempfile
import unittest

import xml_unittest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing import event_file_loader

PEER = os.path.join(
    os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"], "tests/interop/tensorboard_peer"
)


class TensorBoardInteropTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls._folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        subprocess.run([PEER, cls._folder.name], check=True)
        cls.events = event_accumulator.EventAccumulator(
            cls._folder.name, size_guidance={event_accumulator.SCALARS: 0}
        )
        cls.events.Reload()

    @classmethod
    def tearDownClass(cls):
        cls._folder.cleanup()

    def scalars(self, tag):
        return [(event.step, event.value) for event in self.events.Scalars(tag)]

    def test_every_record_is_read(self):
        """The loader drops what has a wrong checksum; nothing may be missing."""
        counts = [
            len(list(event_file_loader.LegacyEventFileLoader(entry.path).Load()))
            for entry in sorted(os.scandir(self._folder.name), key=lambda e: e.name)
        ]
        self.assertEqual(sorted(counts), [2 + 50, 1 + 1 + 200 + 1])

    def test_tags_and_plugins(self):
        tags = self.events.Tags()
        self.assertEqual(sorted(tags["scalars"]), ["diverged", "train/loss", "train/lr"])
        self.assertEqual(tags["tensors"], ["hparams"])
        plugin = self.events.SummaryMetadata("hparams").plugin_data.plugin_name
        self.assertEqual(plugin, "text")

    def test_a_resumed_run_replaces_the_steps_it_repeats(self):
        expected = [(step, 1.0 / (1 + step)) for step in range(100)]
        expected += [(step, -float(step)) for step in range(100, 150)]
        actual = self.scalars("train/loss")
        self.assertEqual([step for step, _ in actual], [step for step, _ in expected])
        for (_, value), (step, wanted) in zip(actual, expected):
            self.assertAlmostEqual(value, wanted, places=6, msg="step %d" % step)

    def test_zero_and_nan_are_values(self):
        self.assertEqual(self.scalars("train/lr")[0], (0, 0.0))
        self.assertTrue(math.isnan(self.scalars("diverged")[0][1]))

    def test_hparams_are_a_table(self):
        (event,) = self.events.Tensors("hparams")
        self.assertEqual([dim.size for dim in event.tensor_proto.tensor_shape.dim], [1])
        text = event.tensor_proto.string_val[0].decode()
        self.assertEqual(text.splitlines()[2:], ["| model | cnn |", "| lr | 0.1 |"])


if __name__ == "__main__":
    xml_unittest.main()
