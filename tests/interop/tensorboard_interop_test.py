"""TensorBoard's reader reads the files of our writer."""

import glob
import json
import math
import os
import subprocess
import tempfile
import unittest

import xml_unittest
from tensorboard import context
from tensorboard.backend.event_processing import data_provider
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import backend_context
from tensorboard.plugins.hparams import get_experiment
from tensorboard.plugins.hparams import list_session_groups

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
PEER = os.path.join(RUNFILES, "tests/interop/tensorboard_peer")
TRAIN = os.path.join(RUNFILES, "tools/train")


class TensorBoardInteropTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls._folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        subprocess.run([PEER, cls._folder.name], check=True)
        cls.run_folder = os.path.join(cls._folder.name, "run")
        cls.events = event_accumulator.EventAccumulator(
            cls.run_folder, size_guidance={event_accumulator.SCALARS: 0}
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
            for entry in sorted(os.scandir(self.run_folder), key=lambda e: e.name)
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

    def hparams_tab(self, folder):
        """What the tab's own requests give for the folder of a sweep: the experiment, and the groups
        of sessions."""
        multiplexer = plugin_event_multiplexer.EventMultiplexer()
        multiplexer.AddRunsFromDirectory(folder)
        multiplexer.Reload()
        provider = data_provider.MultiplexerDataProvider(multiplexer, folder)
        backend = backend_context.Context(
            base_plugin.TBContext(logdir=folder, multiplexer=multiplexer, data_provider=provider)
        )
        request = api_pb2.GetExperimentRequest()
        experiment = get_experiment.Handler(context.RequestContext(), backend, "", request).run()
        request = api_pb2.ListSessionGroupsRequest(
            slice_size=10, allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS]
        )
        groups = list_session_groups.Handler(context.RequestContext(), backend, "", request).run()
        return experiment, groups.session_groups

    def test_hparams_tab_compares_the_jobs_of_a_sweep(self):
        experiment, groups = self.hparams_tab(os.path.join(self._folder.name, "sweep"))
        self.assertEqual(
            {info.name: (info.type, info.differs) for info in experiment.hparam_infos},
            {
                "optimizer.lr": (api_pb2.DATA_TYPE_FLOAT64, True),
                "drop_last": (api_pb2.DATA_TYPE_BOOL, False),
                "optimizer.name": (api_pb2.DATA_TYPE_STRING, True),
                "cap": (api_pb2.DATA_TYPE_STRING, True),
            },
        )
        self.assertEqual(
            [metric.name.tag for metric in experiment.metric_infos], ["test/accuracy"]
        )
        found = {}
        for group in groups:
            (session,) = group.sessions
            found[session.name] = (
                session.status,
                group.hparams["optimizer.lr"].number_value,
                group.hparams["drop_last"].bool_value,
                group.hparams["optimizer.name"].string_value,
                [(value.value, value.training_step) for value in session.metric_values],
            )
            self.assertGreater(session.start_time_secs, 1e9)
        self.assertEqual(
            found,
            {
                "first": (api_pb2.STATUS_SUCCESS, 0.1, True, "sgd", [(0.75, 20)]),
                "second": (api_pb2.STATUS_UNKNOWN, 0.01, True, "adam", [(0.5, 20)]),
            },
        )

    def test_each_job_of_a_sweep_has_its_own_values(self):
        folder = os.path.join(self._folder.name, "jobs")
        subprocess.run(
            [TRAIN, "--multirun", "--log_dir=" + folder, "lr=0.25,0.5", "--model=mlp",
             "--dataset=synthetic", "--train_size=64", "--test_size=16", "--epochs=1",
             "--nproc_per_node=1"],
            check=True, cwd=self._folder.name)  # fmt: skip
        experiment, groups = self.hparams_tab(folder)
        self.assertEqual(
            {info.name for info in experiment.hparam_infos if info.differs},
            {"optimizer.lr", "log.dir", "checkpoint.dir"},
        )
        found = {}
        for group in groups:
            (session,) = group.sessions
            self.assertEqual(session.status, api_pb2.STATUS_SUCCESS)
            self.assertEqual(group.hparams["model.name"].string_value, "mlp")
            self.assertEqual(
                group.hparams["log.dir"].string_value, os.path.join(folder, session.name)
            )
            found[session.name] = (
                group.hparams["optimizer.lr"].number_value,
                {value.name.tag: value.value for value in session.metric_values}["test/accuracy"],
            )
        expected = {}
        for path in glob.glob(folder + "/lr=*/metrics.jsonl"):
            name = os.path.basename(os.path.dirname(path))
            with open(path) as f:
                accuracy = [v for v in map(json.loads, f) if "test/accuracy" in v][-1]["test/accuracy"]
            expected[name] = (float(name[3:].split("-")[0]), accuracy)
        self.assertEqual(sorted(lr for lr, _ in expected.values()), [0.25, 0.5])
        self.assertEqual(found, expected)  # accuracies are sixteenths


if __name__ == "__main__":
    xml_unittest.main()
