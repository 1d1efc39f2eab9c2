#!/usr/bin/env python3
"""Makes chat.json: what Hugging Face transformers makes of conversations by the models' own chat templates.

    make_chat_golden.py TEMPLATES [--out chat.json] [--only FORM]

TEMPLATES is a folder with the texts of `chat_template`, NAME.jinja for each NAME below. They belong to their authors and
are not in this repository: they are in the models' tokenizer_config.json or chat_template.jinja, and many projects
quote them. The conversations are our own. Needs transformers and jinja2, and no torch.

--only: of one form; what the file here says of the others stays, and their templates need not be in the folder.

chat.json: `transformers`, its version; `conversations`, messages by name; `forms`, a list of
    form    the name that inference/chat_template.cu has for it
    models  the SHA-256 of the text by the model's name; "-old": a text that its folder had before. All of a form make
            the same of the conversations, or this program ends with an error
    texts   by the conversation's name, up to where the assistant's next message begins; a conversation that the
            templates refuse is not there
"""

import argparse
import hashlib
import json
import pathlib

import jinja2
import transformers
from transformers.utils.chat_template_utils import render_jinja_template


def talk(*contents, system=None):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + messages


# All end with a message of the user, and the roles take turns, as most templates ask for.
CONVERSATIONS = {
    "one message": talk("What is a warp?"),
    "with a system message": talk("What is a warp?", system="You answer in one sentence."),
    "two questions": talk("What is a warp?", "32 threads that run together.", "And a block?"),
    "three questions, with a system message": talk("1 + 1?", "2", "2 + 2?", "4", "4 + 4?", system="Only the number."),
    "an empty system message": talk("Hello", "Hello!", "Who are you?", system=""),
    "an empty message": talk("", "Yes?", ""),
    "blanks around": talk("  two before, one behind ", " answer\t\n", "\n\nlines around\n", system=" \n be brief \n"),
    "blanks of Unicode": talk("\u3000你好\u00a0", "\u2003您好\u2028", "\u0085再见\u205f", system="\u1680简短\u202f"),
    "only blanks": talk(" ", "\n", "\t ", system="  "),
    "lines and marks": talk("a\n\nb\r\nc", "```c\nint x = 1 < 2;\n```", "'\"&<b>{{ x }}{% y %}\\n 😀"),
    "an answer with its reasoning": talk("17 * 3?", "<think>\n10 * 3 + 7 * 3\n</think>\n\n51", "And by 2?"),
    "the end of a reasoning": talk("17 * 3?", "10 * 3 + 7 * 3\n</think>\n\n51", "And by 2?", system="Think first."),
    "two ends of reasoning": talk("1?", "<think>a</think>b</think> c", "2?", "\n\nno reasoning", "3?"),
    "reasoning of the user": talk("what is </think> for?", "It ends\n<think>", "</think>", system="a</think>b"),
}

DEEPSEEK = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
LLAMA3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = {"bos_token": None, "eos_token": "<|im_end|>"}
# The form, its tokens, and the models whose texts are rendered.
FORMS = [
    ("chatml", CHATML, ["OpenHermes-2.5-Mistral-7B", "Qwen3-Next-80B-A3B-Instruct"]),
    ("qwen2", CHATML, ["CodeQwen1.5-7B-Chat", "Qwen2-7B-Instruct"]),
    ("qwen", CHATML, ["Qwen2.5-7B-Instruct"]),
    ("qwen3", CHATML, ["Qwen3-0.6B", "Qwen3-4B-Instruct-2507"]),
    ("qwen3-thinking", CHATML, ["Qwen3-4B-Thinking-2507"]),
    ("qwq", CHATML, ["QwQ-32B"]),
    ("llama2", SENTENCEPIECE, ["Llama-2-7b-chat-hf"]),
    ("llama3", LLAMA3, ["Meta-Llama-3-8B-Instruct"]),
    ("llama3.1", LLAMA3, ["Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct"]),
    ("deepseek", DEEPSEEK, ["DeepSeek-V3-0324"]),
    ("deepseek-r1", DEEPSEEK, ["DeepSeek-R1-Distill-Llama-8B", "DeepSeek-R1-Distill-Qwen-7B"]),
    ("deepseek-r1-0528", DEEPSEEK, ["DeepSeek-R1-0528", "DeepSeek-R1-0528-Qwen3-8B"]),
    ("deepseek-v3.1", DEEPSEEK, ["DeepSeek-V3.1"]),
    ("mistral-v0", SENTENCEPIECE, ["Mistral-7B-Instruct-v0.2-old"]),
    ("mistral-v1", SENTENCEPIECE, ["Mistral-7B-Instruct-v0.2"]),
    ("mistral", SENTENCEPIECE, ["Mistral-7B-Instruct-v0.3", "Mistral-Large-Instruct-2407"]),
    ("mistral-nemo", SENTENCEPIECE, ["Mistral-Nemo-Instruct-2407"]),
]
# LLaMA 3.2's template asks the clock where it is told no date; our form has the date of the template's other branch.
DATE = "26 Jul 2024"


def render(template, tokens, messages):
    """The text, or None where the template refuses the conversation."""
    try:
        texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True,
                                         date_string=DATE, **tokens)
    except jinja2.TemplateError as error:
        assert "role" in str(error), error
        return None
    return texts[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "chat.json")
    parser.add_argument("--only", choices=[form for form, _, _ in FORMS], metavar="FORM")
    arguments = parser.parse_args()
    golden = {"transformers": transformers.__version__, "conversations": CONVERSATIONS}
    kept, forms = {}, []
    if arguments.only:
        old = json.loads(pathlib.Path(__file__).with_name("chat.json").read_text(encoding="utf-8"))
        assert golden.items() <= old.items(), f"other conversations, or not of transformers {old['transformers']}"
        kept = {form["form"]: form for form in old["forms"] if form["form"] != arguments.only}
    for form, tokens, names in FORMS:
        if form in kept:
            forms.append(kept[form])
            continue
        made, hashes = [], {}
        for name in names:
            template = (arguments.templates / f"{name}.jinja").read_bytes().decode("utf-8")
            texts = {title: render(template, tokens, messages) for title, messages in CONVERSATIONS.items()}
            made.append({title: text for title, text in texts.items() if text is not None})
            hashes[name] = hashlib.sha256(template.encode("utf-8")).hexdigest()
        assert all(texts == made[0] for texts in made), f"{form}: {names} are not the same form"
        forms.append({"form": form, "models": hashes, "texts": made[0]})
    arguments.out.write_text(json.dumps({**golden, "forms": forms}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")



if __name__ == "__main__":
    main()
