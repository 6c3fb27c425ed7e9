"""Chat templates of the kinds that Qwen-VL checkpoints carry, for tests."""

QWEN2_VL = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% "
    "for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ "
    "message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{% set "
    "image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif "
    "%}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}{% set video_count.value = "
    "video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif "
    "%}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3_VL = r"""{%- macro parts(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if item.type == 'image' or 'image' in item or 'image_url' in item %}
                {%- set image_count.value = image_count.value + 1 %}
                {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set image_count = namespace(value=0) %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- parts(messages[0].content) }}
        {{- '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call>" }}
    {{- " XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + parts(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\n' }}
        {{- parts(message.content) }}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- parts(message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or (not loop.first) %}
                {{- '\n' }}
            {%- endif %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- parts(message.content) }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

STRICT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant, not ' + message.role) }}{% endif %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}[{{ message.role }}] {{ message.content | "
    "trim }}{{ eos_token }}\n{% endfor %}"
)
"""Special-token variables, `raise_exception`, a loop control; trims what it is given."""

THINKING = r"""{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content | trim %}
    {%- else %}
        {%- set content %}
            {%- for item in message.content or [] %}{{- item.text or '' }}{%- endfor %}
        {%- endset %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- if call.function.arguments is mapping %}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<parameter=' + key + '>\n' }}
                    {{- value | tojson if value is not string else value }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
            {%- else %}
                {{- call.function.arguments }}
            {%- endif %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == "tool" %}
        {{- '<tool_response>\n' }}
    {%- endif %}
    {{- content.lstrip('\n') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}
"""
"""Of the kind that Qwen3.5 has: trims, joins parts, splits reasoning off, XML calls."""

GLM = r"""[gMASK]<sop>
{%- if tools %}<|system|>
# Tools

You may call one or more functions to assist with the user query.
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>
{% if m.content is string %}{{ m.content }}{% else %}
{%- for item in m.content %}{{ item.text }}{% endfor %}{% endif %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- for tc in m.tool_calls %}
<tool_call>{{ tc.function.name }}
{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
<think></think>
{%- endif -%}"""
"""As zai-org/GLM-4.5V's writes tools and calls."""

MISTRAL = r"""{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
    {%- elif message.tool_calls %}[TOOL_CALLS][
        {%- for call in message.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {%- if not loop.last %}, {% endif %}
        {%- endfor %}]{{ eos_token }}
    {%- else %}{{ message.content }}{{ eos_token }}
    {%- endif %}
{%- endfor %}"""
"""As mistralai's write calls since version 3 of their tokenizers."""
LLAMA = r"""{{- bos_token }}
{%- if tools is not none %}
    {{- "<|start_header_id|>user<|end_header_id|>\n\n" }}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\n\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name ' }}
    {{- 'and its value}. Do not use variables.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}"""
"""As Llama 3.1's to 3.3's ask for calls."""

# ---- templates that join strings, as those of models of text alone do

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set told = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set told = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and told != false %}"
    "{% set content = '<<SYS>>\n' + told + '\n<</SYS>>\n\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
QWEN3_TEXT = r"""{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Leaves parts out without a word, as Qwen3's does."""
LLAMA_VISION = r"""{{- bos_token }}
{%- if tools %}
    {%- set told = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|user|>' + (tools | tojson) + told }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}{{- '<|image|>' }}
            {%- elif part['type'] == 'text' %}{{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
"""As Llama 3.2's: walks parts, but prints the first message as it is where there are tools."""
FIRST_PART = r"""{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set told = messages[0]['content'] -%}
    {%- else -%}{%- set told = messages[0]['content'][0]['text'] -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set told = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {{- '<start_of_turn>' + message['role'] + '\n' + (told if loop.first else '') }}
    {%- if message['content'] is string -%}{{- message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {{- '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\n' }}
{%- endfor -%}"""
"""As Gemma 3's: of a system prompt in parts it shows the first alone."""
MIXED = r"""{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '[SYS]' + message.content + '[/SYS]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL]{"content": ' ~ message.content ~ '}[/TOOL]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' }}
        {%- for part in message.content %}
            {{- '[IMG]' if part.type == 'image' else part.text }}
        {%- endfor %}
        {{- '[/INST]' }}
    {%- elif message.tool_calls %}{{- '[CALLS]' + (message.tool_calls | tojson) }}
    {%- else %}{{- message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
"""As Mistral's with vision: a role at a time. Its users speak in parts alone."""
