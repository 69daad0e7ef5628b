/* The search reads "--flag" as an error, "-np" as "without np", and "word:" as the name of a field. People search for
   flags, and paste messages: this makes such queries plain words. */
{
  const post = Worker.prototype.postMessage
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === 2 && typeof message.data === "string")
      message = { ...message, data: message.data.replace(/(^|\s)[-+]+/g, "$1").replace(/[:^~*]+/g, " ") }
    return post.call(this, message, ...rest)
  }
}
