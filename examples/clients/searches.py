"""Documents, embeddings, reranking and decisions with unchanged clients: the vendors' SDKs,
cohere's, and the retrievers of LangChain, LlamaIndex and Haystack.

Each function tries one feature and returns its observations. An exception is a failure. Embeddings
need a server with `--pooling last`, and reranking a server with a Qwen3-VL-Reranker.
"""

from __future__ import annotations

import io
from typing import Any

from asked import (
    MAX_TOKENS,
    PDF,
    PDF_BASE64,
    PDF_URL,
    QUERY,
    QUESTION,
    TEXTS,
    URL,
    Target,
)
from sdks import anthropic_client, openai_client


def openai_documents(target: Target) -> str:
    """Use a PDF inline and uploaded, in a chat and in a response."""
    client = openai_client(target)
    uploaded = client.files.create(file=("word.pdf", io.BytesIO(PDF)), purpose="user_data")
    for file in ({"file_data": PDF_URL, "filename": "word.pdf"}, {"file_id": uploaded.id}):
        content = [{"type": "file", "file": file}, {"type": "text", "text": QUESTION}]
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(
            model=target.model, messages=messages, max_tokens=MAX_TOKENS
        )
        assert answer.usage.prompt_tokens > 0
        content = [{"type": "input_file", **file}, {"type": "input_text", "text": QUESTION}]
        answer = client.responses.create(
            model=target.model,
            input=[{"role": "user", "content": content}],
            max_output_tokens=MAX_TOKENS,
        )
        assert answer.usage.input_tokens > 0
    client.files.delete(uploaded.id)
    return "inline and uploaded, chat and response"


def anthropic_documents(target: Target) -> str:
    """Use an inline PDF with a cache breakpoint, and a text document."""
    client = anthropic_client(target)
    inline = {"type": "base64", "media_type": "application/pdf", "data": PDF_BASE64}
    text = {"type": "text", "media_type": "text/plain", "data": "a red star"}
    content: Any = [
        {"type": "document", "source": inline, "cache_control": {"type": "ephemeral"}},
        {"type": "document", "source": text, "title": "Notes"},
        {"type": "text", "text": QUESTION},
    ]
    answer = client.messages.create(
        model=target.model,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": content}],
    )
    assert answer.usage.input_tokens + (answer.usage.cache_creation_input_tokens or 0) > 0
    return "PDF and text"


def openai_embeddings(target: Target) -> str:
    """Embed texts, as floats and in the SDK's default base64 encoding."""
    client = openai_client(target)
    asked = {"model": target.model, "input": TEXTS}
    plain = client.embeddings.create(encoding_format="float", **asked).data
    packed = client.embeddings.create(**asked).data
    assert [len(each.embedding) for each in packed] == [len(each.embedding) for each in plain]
    short = client.embeddings.create(dimensions=8, **asked).data
    return f"{len(plain[0].embedding)} and {len(short[0].embedding)} values"


def openai_decisions(target: Target) -> str:
    """Ask three questions about one image."""
    content = [{"type": "input_image", "image_url": URL, "detail": "auto"}]
    questions = [
        {"type": "predicate", "instructions": "The image is red."},
        {
            "type": "choice",
            "instructions": "Which colour?",
            "choices": [{"value": "red"}, {"value": "blue"}],
        },
        {
            "type": "score",
            "instructions": "How bright?",
            "levels": [{"label": "dark"}, {"label": "bright"}],
        },
    ]
    answer = openai_client(target).decisions.create(
        model=target.model, input=[{"role": "user", "content": content}], questions=questions
    )
    return ", ".join(each.type for each in answer.answers)


def cohere_client(target: Target) -> Any:
    import cohere

    return cohere.ClientV2(api_key="none", base_url=target.base)


def cohere_embeddings(target: Target) -> str:
    client = cohere_client(target)
    asked = {"model": target.model, "embedding_types": ["float"]}
    texts = client.embed(input_type="search_document", texts=TEXTS, **asked)
    images = client.embed(input_type="image", images=[URL], **asked)
    return f"{len(texts.embeddings.float_)} texts, {len(images.embeddings.float_)} image"


def cohere_ranks(target: Target) -> str:
    found = cohere_client(target).rerank(model=target.model, query=QUERY, documents=TEXTS, top_n=2)
    return f"best: {TEXTS[found.results[0].index]}"


def langchain_embeddings(target: Target) -> str:
    """Use a vector store and its retriever, without tokenizing by tiktoken for OpenAI's models."""
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        model=target.model, base_url=target.v1, api_key="none", check_embedding_ctx_length=False
    )
    retriever = InMemoryVectorStore.from_texts(TEXTS, made).as_retriever(search_kwargs={"k": 1})
    (best,) = retriever.invoke(TEXTS[1])
    assert best.page_content == TEXTS[1]
    return "a retriever finds a text by itself"


def langchain_documents(target: Target) -> str:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=target.model, base_url=target.v1, api_key="none", max_tokens=MAX_TOKENS)
    file = {
        "type": "file",
        "base64": PDF_BASE64,
        "mime_type": "application/pdf",
        "filename": "word.pdf",
    }
    answer = chat.invoke([HumanMessage([file, {"type": "text", "text": QUESTION}])])
    return f"{answer.usage_metadata['input_tokens']} tokens"


def llama_index_embeddings(target: Target) -> str:
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    made = OpenAILikeEmbedding(model_name=target.model, api_base=target.v1, api_key="none")
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=made
    )
    (best,) = index.as_retriever(similarity_top_k=1).retrieve(TEXTS[1])
    assert best.get_content() == TEXTS[1]
    return "a retriever finds a text by itself"


def haystack_embeddings(target: Target) -> str:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore
    from haystack.utils import Secret

    key = Secret.from_token("none")
    asked: Any = {"api_key": key, "api_base_url": target.v1, "model": target.model}
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    documents = [Document(content=text) for text in TEXTS]
    store.write_documents(
        OpenAIDocumentEmbedder(progress_bar=False, **asked).run(documents)["documents"]
    )
    query = OpenAITextEmbedder(**asked).run(TEXTS[1])["embedding"]
    (best,) = InMemoryEmbeddingRetriever(store, top_k=1).run(query)["documents"]
    assert best.content == TEXTS[1]
    return "a retriever finds a text by itself"
