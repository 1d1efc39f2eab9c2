#!/usr/bin/env python3
"""Makes beams.txt: what generate() of Hugging Face transformers finds by beam search in a small language.

    python3 make_beam_golden.py

The logits of a token depend on the token before it and on how many tokens stand before it, by the formula in `logits`:
test_beam_search.cu computes the same ones. The prompt is token 0. Lines of the file:

    case num_beams length_penalty early_stopping max_new_tokens seed V n_eos eos ...
    answer score tokens ...       all num_beams of them, in the order in which generate() returns them
"""

import pathlib

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

CASES = [(k, penalty, early, length, seed, v, eos)
         for k, length, v, eos in [(2, 8, 7, [3]), (4, 6, 11, [1]), (3, 9, 11, [2, 7]), (5, 12, 23, [4]), (6, 4, 5, [])]
         for penalty in (0.0, 1.0, 2.5, -1.0)
         for early in (True, False, "never")
         for seed in (1, 2)]


def logits(place, before, v, seed):
    return (before * 37 + v * (61 + 2 * seed) + before * v * 11 + place * (97 + 13 * v * v) + seed * 17) % 1009 / 256


class Language(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.tensor(config.table, dtype=torch.float32))
        self.post_init()

    def _init_weights(self, module):
        pass

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return CausalLMOutput(logits=self.table[torch.arange(input_ids.shape[1]), input_ids])


def main():
    lines = []
    for k, penalty, early, length, seed, v, eos in CASES:
        table = [[[logits(t, a, b, seed) for b in range(v)] for a in range(v)] for t in range(length)]
        config = PretrainedConfig(vocab_size=v, table=table, num_hidden_layers=1, hidden_size=1,
                                  num_attention_heads=1)
        out = Language(config).generate(torch.zeros(1, 1, dtype=torch.long), attention_mask=torch.ones(1, 1, dtype=torch.long),
                                      num_beams=k, num_return_sequences=k, length_penalty=penalty,
                                      early_stopping=early, max_new_tokens=length, eos_token_id=eos or None, pad_token_id=v,
                                      do_sample=False, use_cache=False, return_dict_in_generate=True, output_scores=True)
        lines.append(f"case {k} {penalty} {early} {length} {seed} {v} {len(eos)} " + " ".join(map(str, eos)))
        for i, tokens in enumerate(out.sequences.tolist()):
            tokens = [t for t in tokens[1:] if t != v]
            score = out.sequences_scores[i].item()
            lines.append(f"answer {score:.7g} {len(tokens)} " + " ".join(map(str, tokens)))
    pathlib.Path(__file__).with_name("beams.txt").write_text("\n".join(line.rstrip() for line in lines) + "\n")


if __name__ == "__main__":
    main()
