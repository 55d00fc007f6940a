"""Prints what torch.optim.lr_scheduler gives for each schedule: testdata/schedules.txt.

    python3 ddp/trainer/testdata/schedules.py > ddp/trainer/testdata/schedules.txt

One line per case: the options of ddp/trainer/schedule.h, what the case is driven by, and the factor of the base rate
in each step. A run has EPOCHS epochs of STEPS steps. Schedule plateau is given one metric per line's `metrics=`, and
its rates follow these. Factors are rounded to 12 digits, which another CPU gives as well.
"""

import torch

EPOCHS, STEPS = 6, 5
TOTAL = EPOCHS * STEPS
BASE = 0.5

CASES = {
    "name=step step_epochs=2 gamma=0.3": lambda o: torch.optim.lr_scheduler.StepLR(o, 2 * STEPS, 0.3),
    "name=multistep milestones=1,2,5 gamma=0.5": lambda o: torch.optim.lr_scheduler.MultiStepLR(
        o, [STEPS, 2 * STEPS, 5 * STEPS], 0.5
    ),
    "name=cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL),
    "name=cosine min_factor=0.1": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL, BASE * 0.1),
    "name=polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, TOTAL, 1.0),
    "name=polynomial power=2.5": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, TOTAL, 2.5),
    "name=linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, TOTAL),
    "name=linear start_factor=0.25 end_factor=1": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, 1.0, TOTAL),
    "name=onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, BASE, TOTAL, cycle_momentum=False),
    "name=onecycle pct_start=0.4 anneal=linear div_factor=10 final_div_factor=100": lambda o: (
        torch.optim.lr_scheduler.OneCycleLR(
            o,
            BASE,
            TOTAL,
            pct_start=0.4,
            anneal_strategy="linear",
            div_factor=10,
            final_div_factor=100,
            cycle_momentum=False,
        )
    ),
}

METRICS = [1.0, 0.9, 0.95, 0.95, 0.9, float("nan"), 0.89995, 0.7, 0.7, 0.7, 0.7, 0.7, 0.6, 0.65, 0.64, 0.63, 0.62, 0.61]
PLATEAUS = [
    dict(factor=0.5, patience=1),
    dict(factor=0.5, patience=1, cooldown=2),
    dict(factor=0.25, patience=0, min_lr=0.02),
    dict(factor=0.5, patience=2, threshold=0.2),
    dict(factor=0.5, patience=1, threshold=0.06, threshold_mode="abs"),
    dict(mode="max", factor=0.5, patience=2),
    dict(mode="max", factor=0.5, patience=1, threshold=0.01, threshold_mode="abs", cooldown=1),
]


def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)


def text(values):
    return " ".join(f"{value:.12g}" for value in values)


def main():
    print(f"# epochs={EPOCHS} steps_per_epoch={STEPS} base_lr={BASE}: testdata/schedules.py, {torch.__version__}")
    for options, make in CASES.items():
        sgd = optimizer()
        scheduler = make(sgd)
        factors = []
        for _ in range(TOTAL):
            factors.append(sgd.param_groups[0]["lr"] / BASE)
            sgd.step()
            scheduler.step()
        print(f"{options} | {text(factors)}")
    for given in PLATEAUS:
        sgd = optimizer()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, **given)
        factors = []
        for metric in METRICS:
            scheduler.step(metric)
            factors.append(sgd.param_groups[0]["lr"] / BASE)
        options = " ".join(f"plateau.{name}={value}" for name, value in given.items())
        print(f"name=plateau {options} metrics={','.join(map(str, METRICS))} | {text(factors)}")


if __name__ == "__main__":
    main()
