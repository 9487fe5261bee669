"""Draw docs/loss_curve.svg: one model, trained on real text in three layouts from one checkpoint.

torchrun --nproc-per-node 2 docs/loss_curve.py        # train (about three minutes on two CPU cores), then draw
python docs/loss_curve.py                             # draw again from docs/loss_curve.json
"""

import json
import os
import sysconfig
from pathlib import Path

from axes import TOP, WIDTH, frame

HERE = Path(__file__).parent
TRAIN_ITERS, SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 300, 128, 8, 16
LAYOUTS = {
    "tensor parallel 2": {"tensor_model_parallel_size": 2},
    "pipeline parallel 2": {"pipeline_model_parallel_size": 2},
    "data parallel 2, sharded optimizer": {"tensor_model_parallel_size": 1},
}
COLOURS = ("#0969da", "#bf3989", "#1a7f37")


def build_state(layout):
    import minloop

    config = minloop.build_config(
        num_layers=4, hidden_size=128, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, **layout,
    )  # fmt: skip
    groups = minloop.init_distributed(config, seed=1234)
    chunks = minloop.build_gpt_model(
        config, groups, vocab_size=256, max_sequence_length=SEQUENCE_LENGTH, position_embedding_type="rope"
    )
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=3e-3, weight_decay=0.1)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    scheduler = minloop.build_scheduler(
        optimizer, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=TRAIN_ITERS, lr_warmup_iters=20
    )
    return minloop.TrainState(chunks, optimizer, scheduler, config, groups)


def build_text():
    """The sources of the standard library, bytes, written as .bin and .idx by one rank, once."""
    import torch.distributed as dist

    import minloop

    prefix, tokenizer = Path("checkpoints/loss_curve_text/text"), minloop.build_byte_tokenizer()
    if dist.get_rank() == 0 and not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        minloop.write_indexed((file.read_text("utf-8", errors="replace") for file in files), prefix, tokenizer)
    dist.barrier()
    config = minloop.build_dataset_config(
        sequence_length=SEQUENCE_LENGTH, tokenizer=tokenizer, blend=([str(prefix)], None), split="1,0,0"
    )
    return minloop.build_gpt_datasets(config, (None, 0, 0), vocab_size=256)[0]


def train():
    """Train in each layout from the first one's initial weights; write the losses (nats per byte) on one rank."""
    import minloop

    losses, first_rank = {}, False
    for name, layout in LAYOUTS.items():
        state = build_state(layout)
        (minloop.load_checkpoint if losses else minloop.save_checkpoint)("checkpoints/loss_curve", state)
        loader = minloop.build_loader(build_text(), state.groups, micro_batch_size=MICRO_BATCH_SIZE)
        count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, state.groups)
        steps = [minloop.train_step(state, loader, num_microbatches=count) for _ in range(TRAIN_ITERS)]
        losses[name] = [step.loss.item() for step in steps]
        first_rank = minloop.is_first_rank(state.groups)
        minloop.shutdown_distributed()
    if first_rank:
        (HERE / "loss_curve.json").write_text(json.dumps(losses) + "\n")
    return first_rank


def draw(losses):
    """Return the SVG: the curves over one another, thick to thin, so that each shows where they coincide."""
    count = len(next(iter(losses.values())))
    parts, x, y = frame(count, 6, height=300)
    for index, (name, curve) in enumerate(losses.items()):
        stroke = f'stroke="{COLOURS[index]}" stroke-width="{5 - 2 * index}"'
        points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        legend = TOP + 20 + 18 * index
        parts.append(f'<path d="M{WIDTH - 280} {legend - 4}h24" {stroke}/>')
        parts.append(f'<text x="{WIDTH - 248}" y="{legend}">{name}</text>')
    first, *others = losses.values()

    def apart(steps):
        return max(abs(a - b) for other in others for a, b in zip(first[:steps], other[:steps], strict=True))

    for line, text in enumerate(
        (f"apart by {apart(20):.0e} in 20 iterations;", f"rounding grows to {apart(count):.0e}")
    ):
        parts.append(f'<text x="{WIDTH - 280}" y="{TOP + 20 + 18 * (len(losses) + line)}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if "RANK" not in os.environ or train():
        (HERE / "loss_curve.svg").write_text(draw(json.loads((HERE / "loss_curve.json").read_text())))
