"""Run by the Python that has tensorboard and torch: the real TensorBoard reads what write_run wrote into FOLDER, and PyTorch's own writer
writes the same tensors into OTHER; what TensorBoard makes of both must be the same. Usage: read_events.py FOLDER OTHER"""

import glob
import io
import math
import os
import sys

import numpy as np
from PIL import Image
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter

EVERYTHING = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0, "compressedHistograms": 0}


def read(folder, files=1):
    found = glob.glob(os.path.join(folder, "events.out.tfevents.*"))
    assert len(found) == files, (folder, found)
    events = EventAccumulator(folder, size_guidance=EVERYTHING)
    events.Reload()
    return events


def check_scalars(events):
    curve = events.Scalars("curve")
    assert [(point.step, point.value) for point in curve] == [(i, float(np.float32(math.sin(i * 0.1)))) for i in range(1000)]
    assert all(1.7e9 < point.wall_time < 1e10 for point in curve)
    assert math.isnan(events.Scalars("not a number")[0].value)
    assert events.Scalars("infinite")[0].value == math.inf
    loss = events.Scalars("train/loss")
    assert [point.step for point in loss] == list(range(1, 41)), loss
    assert [(point.step, point.value) for point in events.Scalars("valid/loss")] == [(20, 1.0), (40, 0.5)]


def check_histograms(ours, theirs, tensors):
    count = 0
    for name, tensor in tensors.items():
        if tensor.ndim == 3:
            continue
        count += 1
        (here,), (there,) = ours.Histograms(name), theirs.Histograms(name)
        assert here.step == there.step == 7
        here, there = here.histogram_value, there.histogram_value
        assert list(here.bucket_limit) == list(there.bucket_limit), (name, here.bucket_limit, there.bucket_limit)
        assert list(here.bucket) == list(there.bucket), (name, here.bucket, there.bucket)
        assert (here.min, here.max, here.num) == (there.min, there.max, there.num), name
        for mine, other in ((here.sum, there.sum), (here.sum_squares, there.sum_squares)):
            # PyTorch adds up in the tensor's own precision.
            assert math.isclose(mine, other, rel_tol=1e-4, abs_tol=1e-4 * max(1, abs(there.max))), (name, mine, other)
    assert count == 6


def check_images(ours, theirs, tensors):
    def pixels(event):
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert (event.width, event.height) == image.size
        return np.asarray(image.convert("RGBA"))

    for name in ("rgb", "gray", "rgba"):
        (here,), (there,) = ours.Images(name), theirs.Images(name)
        assert np.array_equal(pixels(here), pixels(there)), name
    assert (pixels(ours.Images("columns")[0])[..., :3] == 77).all() and pixels(ours.Images("columns")[0]).shape == (4, 6, 4)
    assert (pixels(ours.Images("flat")[0])[..., 0] == 0).all()


def check_the_rest(folder, ours, theirs):
    text, = ours.Tensors("note/text_summary")
    other, = theirs.Tensors("note/text_summary")
    assert text.tensor_proto == other.tensor_proto, (text, other)
    assert text.tensor_proto.string_val[0].decode() == "**bold** <b>text</b> \u00fc"
    assert ours.SummaryMetadata("note/text_summary").plugin_data == theirs.SummaryMetadata("note/text_summary").plugin_data
    for name, sign in (("a", 1), ("b", -1)):
        part = read(os.path.join(folder, "both_" + name))
        assert [(p.step, p.value) for p in part.Scalars("both")] == [(i, float(sign * i)) for i in range(3)]


def check_hparams(folder, other):
    def content(where, tag):
        return HParamsPluginData.FromString(read(where).SummaryMetadata(tag).plugin_data.content)

    here, there = os.path.join(folder, "trial"), os.path.join(other, "trial")
    for tag in ("_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"):
        mine, wanted = content(here, tag), content(there, tag)
        for message in (mine, wanted):
            message.experiment.time_created_secs = message.session_start_info.start_time_secs = message.session_end_info.end_time_secs = 0
            message.experiment.hparam_infos.sort(key=lambda info: info.name)
        assert mine == wanted, (mine, wanted)
    assert read(here).Scalars("accuracy")[0].value == 0.75


def write_by_pytorch(other, tensors):
    with SummaryWriter(other) as writer:
        for name, tensor in tensors.items():
            if tensor.ndim == 3:
                writer.add_image(name, tensor, 7)
            else:
                writer.add_histogram(name, tensor, 7)
        writer.add_text("note", "**bold** <b>text</b> \u00fc", 2)
        writer.add_hparams({"lr": 0.5, "batch": 64, "nesterov": True, "optimizer": "sgd"}, {"accuracy": 0.75}, run_name="trial", global_step=0)


def main(folder, other):
    inner = os.path.join(folder, "tensorboard")
    tensors = load_file(os.path.join(inner, "written.safetensors"))
    write_by_pytorch(other, tensors)
    ours, theirs = read(inner), read(other)
    check_scalars(ours)
    check_histograms(ours, theirs, tensors)
    check_images(ours, theirs, tensors)
    check_the_rest(inner, ours, theirs)
    check_hparams(inner, other)
    ranks = sorted(EventAccumulator(path).Reload().Scalars("rank")[0].value for path in glob.glob(os.path.join(folder, "everywhere", "*")))
    assert ranks == [0, 1], ranks
    assert read(os.path.join(folder, "main_only")).Scalars("rank")[0].value == 0
    print("the same")


main(*sys.argv[1:])
