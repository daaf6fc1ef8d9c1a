// The search of pages that are opened from the disk, where a browser starts no worker: its script runs in a hidden frame instead.
// Called as the builder's plugin `offline` looks for it, which would fetch one from elsewhere.
if (location.protocol === "file:")
  window.Worker = class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = Object.assign(frame.contentDocument.createElement("script"), { src: address });
      this.begun = new Promise((loaded) => script.addEventListener("load", loaded));
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.begun.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
