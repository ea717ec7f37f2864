"""What an algorithm computes, as Markdown: its formulas beside the settings that stand in them.

Formulas are written in plain signs, so that they can be read without a renderer.
"""

from fedmem.strategies import CLIPPING, options_of

__all__ = ["describe"]

MEAN = "Σ_j n_j · w_j ∕ Σ_j n_j"
FORMULAS = {
    "fedavg": [f"w_{{t+1}} = {MEAN}"],
    "fedprox": [
        "client j minimises loss_j(w) + (μ∕2) · ‖w − w_t‖², over the trained parameters",
        f"w_{{t+1}} = {MEAN}",
    ],
    "central": ["w_{t+1} = the weights after training on the rows of all clients together, from w_t"],
    "local": ["w_{t+1, j} = the weights after training on the rows of client j alone, from w_{t, j}"],
    "none": ["w = the model as it is"],
    "FedAvgM": [
        f"d = w_t − {MEAN}",
        "v_{t+1} = server_momentum · v_t + d",
        "w_{t+1} = w_t − server_learning_rate · v_{t+1}",
    ],
    "FedMedian": ["w_{t+1} = median over the clients j of w_j, coordinate by coordinate"],
    "FedTrimmedAvg": [
        "w_{t+1} = mean over the clients of w_j, coordinate by coordinate, without the share beta at either end"
    ],
    "Krum": ["w_{t+1} = the w_j that is nearest to its n − num_malicious_nodes − 2 nearest others"],
    "MultiKrum": [
        "w_{t+1} = weighted mean of the num_nodes_to_select w_j that are nearest to their n − num_malicious_nodes − 2 "
        "nearest others"
    ],
    "Bulyan": [
        "S = the n − 2 · num_malicious_nodes clients that MultiKrum selects",
        "w_{t+1} = mean of the values nearest to the median over S, coordinate by coordinate",
    ],
    "QFedAvg": [
        "Δ_j = loss_j^q · (w_t − w_j) ∕ client_learning_rate",
        "h_j = q · loss_j^(q−1) · ‖w_t − w_j‖² ∕ client_learning_rate² + loss_j^q ∕ client_learning_rate",
        "w_{t+1} = w_t − Σ_j Δ_j ∕ Σ_j h_j",
    ],
} | {
    name: [
        f"d = {MEAN} − w_t",
        "m_{t+1} = d" if name == "FedAdagrad" else "m_{t+1} = beta_1 · m_t + (1 − beta_1) · d",
        second,
        f"w_{{t+1}} = w_t + {rate} · m_{{t+1}} ∕ (√v_{{t+1}} + tau)",
    ]
    for name, second, rate in (
        ("FedAdagrad", "v_{t+1} = v_t + d²", "eta"),
        (
            "FedAdam", "v_{t+1} = beta_2 · v_t + (1 − beta_2) · d²",
            "eta · √(1 − beta_2^(t+2)) ∕ (1 − beta_1^(t+2))",
        ),
        ("FedYogi", "v_{t+1} = v_t − (1 − beta_2) · d² · sign(v_t − d²)", "eta"),
    )
}  # fmt: skip


def describe(config) -> str:
    """Markdown: the formulas of `config.algorithm` as a quotation, and what its letters are in this run.

    config: a TrainConfig. In a round t, w_t is what every client starts from, w_j what client j makes of it, n_j the
    rows it used; t counts from 0. Raises FederatedError for strategy_options that the algorithm does not have.
    """
    lines, noisy = list(FORMULAS[config.algorithm]), _clips(config)
    if noisy:
        lines.insert(-1, f"w_j ← w_t + (w_j − w_t) · min(1, C ∕ ‖w_j − w_t‖)   ({CLIPPING})")
        lines.append(f"w_{{t+1}} ← w_{{t+1}} + N(0, σ²), σ = z · C ∕ L   ({CLIPPING})")
    settings = _settings(config)
    if noisy:
        settings += [f"C = update_clip = {config.update_clip:g}", f"z = update_noise = {config.update_noise:g}"]
    quoted = "\n>\n".join(f"> {line}" for line in lines)
    return f"**{config.algorithm}**\n\n{quoted}\n\n" + (f"with {', '.join(settings)}.\n" if settings else "")


def _settings(config) -> list[str]:
    if config.algorithm == "none":
        return []
    work = (config.local_steps, "local step") if config.local_steps else (config.local_epochs, "local epoch")
    settings = [f"{count} {what}{'s' * (count != 1)}" for count, what in ((config.rounds, "round"), work)]
    if config.algorithm == "fedprox":
        settings.append(f"μ = {config.proximal_mu:g}")
    if config.algorithm not in ("central", "local"):
        defaults = {name: p.default for name, p in options_of(config.algorithm).items() if p.default is not p.empty}
        settings += [f"{name} = {value}" for name, value in (defaults | config.strategy_options).items()]
    return settings


def _clips(config) -> bool:
    return config.update_clip is not None and config.algorithm not in ("none", "central", "local")
