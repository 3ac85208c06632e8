"""Prints what bench_step measured as a table, with the targets.

    python3 bench/step/report.py FILE
"""

import json
import sys

# Step over side-by-side step, by optimizer and model. small_1000 with sgd: milliseconds beyond it. linear_100m:
# milliseconds to attach.
TARGETS = {("lockstep", "sgd", "mlp"): 1.20, ("lockstep", "sgd", "resnet"): 1.03, ("lockstep", "sgd", "transformer"): 1.08,
           ("lockstep_shared", "sgd", "mlp"): 0.95, ("lockstep_sharded", "sgd", "mlp"): 1.05,
           ("lockstep_shared", "adamw", "mlp"): 0.60, ("lockstep_shared", "adamw", "transformer"): 0.75}


def verdict(row, alone):
    target = TARGETS.get((row["system"], row["optimizer"], row["model"]))
    if target is not None:
        return f"target <= {target:.2f}"
    if row["system"] != "lockstep" or row["optimizer"] != "sgd":
        return ""
    if row["model"] == "small_1000" and alone:
        return f"{row['median_ms'] - alone['median_ms']:+.2f} ms beyond side by side, target < 1"
    return "target: attached in < 1000 ms" if row["model"] == "linear_100m" else ""


def main():
    with open(sys.argv[1]) as file:
        figures = json.load(file)
    print(f"{'model':<13}{'optimizer':<11}{'system':<22}{'median ms':>10}{'min ms':>9}{'cpu ms':>9}{'ratio':>8}{'attach ms':>11}{'peak MiB':>10}")
    alone = {(row["model"], row["optimizer"]): row for row in figures["rows"] if row["system"] == "side_by_side"}
    for row in figures["rows"]:
        times = "".join(f"{row[key]:>{width}.2f}" if key in row else f"{'':>{width}}"
                        for key, width in (("median_ms", 10), ("min_ms", 9), ("cpu_ms", 9), ("ratio", 8)))
        print(f"{row['model']:<13}{row['optimizer']:<11}{row['system']:<22}{times}{row['attach_ms']:>11.1f}{row['peak_mib']:>10.0f}  "
              f"{verdict(row, alone.get((row['model'], row['optimizer'])))}".rstrip())
    for name, reason in (figures["failed"] or {}).items():
        model, optimizer, system = name.split(", ", 2)
        print(f"{model:<13}{optimizer:<11}{system:<22}NOT MEASURED: {reason.splitlines()[0]}")


if __name__ == "__main__":
    main()
