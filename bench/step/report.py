"""Prints what bench_step measured as a table, with the targets.

    python3 bench/step/report.py FILE
"""

import json
import sys

# Step over side-by-side step, by optimizer and model. linear_100m: milliseconds to attach.
TARGETS = {("lockstep", "sgd", "mlp"): 1.20, ("lockstep", "sgd", "resnet"): 1.03, ("lockstep", "sgd", "transformer"): 1.08,
           ("lockstep_shared", "sgd", "mlp"): 0.95, ("lockstep_sharded", "sgd", "mlp"): 1.05,
           ("lockstep_shared", "adamw", "mlp"): 0.60, ("lockstep_shared", "adamw", "transformer"): 0.75,
           ("python_attach", "sgd", "mlp"): 1.20}
# The same over another system's step.
OVER = {("lockstep_shared", "adamw", "mlp"): ("side_by_side_fused", 0.97),
        ("lockstep_sharded", "sgd", "small_1000"): ("lockstep", 1.00), ("lockstep_shared", "sgd", "small_1000"): ("lockstep", 1.00)}
# Milliseconds beyond the step without communication, which is the first of these that was measured.
BASES = ("side_by_side_kept", "side_by_side")
BEYOND = {("lockstep", "sgd", "small_1000"): 1, ("python_attach", "sgd", "small_1000"): 1.5}


def verdict(row, rows):
    """`rows`: by system, optimizer and model."""
    key = row["system"], row["optimizer"], row["model"]
    said = []
    if key in TARGETS:
        said.append(f"target <= {TARGETS[key]:.2f}")
    other, target = OVER.get(key, ("", 0))
    if base := rows.get((other, *key[1:])):
        said.append(f"{row['median_ms'] / base['median_ms']:.2f} of {other}, target <= {target:.2f}")
    if key in BEYOND and (alone := next((rows[base, *key[1:]] for base in BASES if (base, *key[1:]) in rows), None)):
        said.append(f"{row['median_ms'] - alone['median_ms']:+.2f} ms beyond {alone['system']}, target < {BEYOND[key]}")
    if key == ("lockstep", "sgd", "linear_100m"):
        said.append("target: attached in < 1000 ms")
    return "; ".join(said)


def main():
    with open(sys.argv[1]) as file:
        figures = json.load(file)
    print(f"{'model':<13}{'optimizer':<11}{'system':<22}{'median ms':>10}{'min ms':>9}{'cpu ms':>9}{'ratio':>8}{'attach ms':>11}{'peak MiB':>10}")
    rows = {(row["system"], row["optimizer"], row["model"]): row for row in figures["rows"]}
    for row in figures["rows"]:
        times = "".join(f"{row[key]:>{width}.2f}" if key in row else f"{'':>{width}}"
                        for key, width in (("median_ms", 10), ("min_ms", 9), ("cpu_ms", 9), ("ratio", 8)))
        print(f"{row['model']:<13}{row['optimizer']:<11}{row['system']:<22}{times}{row['attach_ms']:>11.1f}{row['peak_mib']:>10.0f}  "
              f"{verdict(row, rows)}".rstrip())
    for name, reason in (figures["failed"] or {}).items():
        model, optimizer, system = name.split(", ", 2)
        print(f"{model:<13}{optimizer:<11}{system:<22}NOT MEASURED: {reason.splitlines()[0]}")


if __name__ == "__main__":
    main()
