"""A target of some million parameters with a multi-token-prediction head worth tuning: a MiMo trained on GSM8K's
questions for a few minutes, head included, as such heads are trained: on text, one token ahead, by hard labels.

    python tests/bench/mtp_target.py --prompts gsm8k_train_prompts.jsonl --out FOLDER --minutes 6 --head-minutes 2
    spectrain run target.path=FOLDER/target target.name=mimo_gsm8k target.max_length=256 drafter=mtp data=jsonl \
        data.train=FOLDER/train.jsonl data.heldout=FOLDER/heldout.jsonl run.dir=RUN

A user's turn is the first sentence of a question, the answer is the rest of it. The last 64 questions are held out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig, LossConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.mtp import METHOD
from spectrain.drafters.build import build_drafter
from spectrain.target.head import TargetHead
from spectrain.target.smoke_targets import add_mtp_head, change_config
from spectrain.target.spec import TargetSpec
from spectrain.target.tiny_targets import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START

VOCAB, HELDOUT, DOCUMENTS = 1024, 64, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--head-minutes", type=float, default=2.0)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    pairs = questions(Path(options.prompts), options.questions)
    tokenizer = make_tokenizer([f"{first} {rest}" for first, rest in pairs])
    folder = options.out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    asked = {first for first, _ in pairs[:-HELDOUT]}
    heldout = [pair for pair in pairs[-HELDOUT:] if pair[0] not in asked]  # two questions may begin alike
    for name, part in (("train", pairs[:-HELDOUT]), ("heldout", heldout)):
        lines = [json.dumps({"turns": [first]}) for first, _ in part]
        (options.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    documents = [encoded(tokenizer, first, rest) for first, rest in pairs[:-HELDOUT]]

    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0}
    config = AutoConfig.for_model(
        "qwen2",
        **ids,
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    steps, loss = train(model.parameters(), documents, options.minutes, lambda batch: target_loss(model, batch), 3e-3)
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps, loss {loss:.3f}")
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    change_config(folder, architectures=["MiMoForCausalLM"])
    add_mtp_head(folder)
    train_head(model, folder, documents, options.head_minutes)


def questions(path: Path, count: int) -> list[tuple[str, str]]:
    """(first sentence, the rest) of each question that has both, without the instruction behind it."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n")[:count]:
        text = json.loads(line)["turns"][0].split("\nPlease reason")[0]
        first, dot, rest = text.partition(". ")
        if dot and rest:
            found.append((first + ".", rest))
    return found


def make_tokenizer(texts: list[str]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE
    )


def encoded(tokenizer: Any, first: str, rest: str) -> tuple[list[int], int]:
    """Ids of a conversation, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": first}], add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer(rest, add_special_tokens=False).input_ids
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def train(parameters: Any, documents: Any, minutes: float, loss_of: Any, rate: float) -> tuple[int, float]:
    """AdamW for so many minutes of wall-clock time, the rate falling to nothing."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    generator, start, step, mean = torch.Generator().manual_seed(0), time.monotonic(), 0, 0.0
    while (passed := (time.monotonic() - start) / (60 * minutes)) < 1:
        numbers = torch.randint(len(documents), (DOCUMENTS,), generator=generator).tolist()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (1 - passed)
        loss = loss_of([documents[number] for number in numbers])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean, step = 0.95 * mean + 0.05 * float(loss), step + 1
    return step, mean / (1 - 0.95**step)


def padded(batch: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, S] and labels, -100 behind the end."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
    labels = torch.tensor([ids + [-100] * (longest - len(ids)) for ids, _ in batch])
    return ids, labels


def target_loss(model: Any, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    ids, labels = padded(batch)
    return model(input_ids=ids, labels=labels).loss


def train_head(model: Any, folder: Path, documents: Any, minutes: float) -> None:
    """The head in ``folder`` on the same text, one token ahead, by hard labels; the target stays as it is."""
    spec, head = TargetSpec.from_folder(folder), TargetHead.from_checkpoint(folder)
    config = DrafterConfig(
        "mtp", init="last_layer", loss=LossConfig({"ce": 1.0, "tv": 0.0}), autoregressive=AutoregressiveConfig(1)
    )
    drafter = build_drafter(config, spec, full_vocab(spec.vocab_size), head, folder)
    states: dict[str, torch.Tensor] = {}
    model.get_decoder().norm.register_forward_pre_hook(lambda module, args: states.update(last=args[0].detach()))

    def loss_of(batch: list[tuple[list[int], int]]) -> torch.Tensor:
        ids, _ = padded(batch)
        with torch.no_grad():
            model(input_ids=ids)
        lengths = [len(one) for one, _ in batch]
        sums = drafter.train_losses(
            PackedBatch(
                input_ids_T=torch.cat([torch.tensor(one) for one, _ in batch]),
                loss_mask_T=torch.cat([torch.ones(length, dtype=torch.bool) for length in lengths]),
                position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
                document_ids_T=torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths)),
                taps_TAH=torch.zeros(sum(lengths), 0, head.hidden_size),
                last_hidden_TH=torch.cat([states["last"][row, :length] for row, length in enumerate(lengths)]),
                log_normalizer_T=None,
            )
        )
        return sums.loss / sums.weight

    steps, loss = train(drafter.parameters(), documents, minutes, loss_of, 2e-3)
    print(f"head: {sum(p.numel() for p in drafter.parameters()):,} parameters, {steps} steps, loss {loss:.3f}")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor.detach() for name, tensor in METHOD.stored_tensors(drafter).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
